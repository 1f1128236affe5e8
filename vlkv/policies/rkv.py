from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression.observe import Observation, pool
from vlkv.compression.option_types import Odd, Pooling, Positive, Unit
from vlkv.compression.policy import Scores
from vlkv.masks import tokens_of
from vlkv.policies.snapkv import SnapKV

_BLOCK = 128  # keys that are compared with all others at a time


class RKV(SnapKV):
    """Importance minus redundancy, selected again while decoding (Cai et al. 2025, Sec. 3), as in the authors' code.

    Importance is the attention of the newest `window` queries, with the largest logit of the query heads that share a
    key head. Redundancy is the mean cosine of a key with all others, after a softmax over the tokens. The last key that
    is similar to a key does not count for it, so that the newest of several similar tokens is kept.

    Attributes:
        interval: number of new tokens after which entries are selected again.
        balance: weight of the importance, against 1 - balance for the redundancy.
        threshold: cosine from which two keys are similar. Other options are those of SnapKV.
    """

    window: Positive = 8
    kernel: Odd = 7
    pooling: Pooling = "max"
    interval: Positive = 128
    balance: Unit = 0.07
    threshold: Unit = 0.5
    every = property(lambda self: self.interval)

    def score(self, obs: Observation) -> Scores:
        importance = pool(self.importance(obs), self.kernel, self.pooling)
        return self.balance * importance - (1 - self.balance) * redundancy(obs, self.threshold)

    def importance(self, obs: Observation) -> Scores:
        """Attention of the window to the tokens before it; 0 for other tokens."""
        rows, (kv_heads, _, head_dim) = tokens_of(self.protect(obs) & obs.observers, self.window), obs.k.shape
        q = obs.q[:, jnp.maximum(rows, 0)].reshape(kv_heads, -1, len(rows), head_dim).astype(jnp.float32)
        logits = jnp.einsum("kgrh,kth->kgrt", q, obs.k.astype(jnp.float32), precision="highest") / head_dim**0.5
        among = self.candidates(obs)
        shares = jax.nn.softmax(jnp.max(logits, axis=1), axis=-1, where=among)
        weight = jnp.where(rows >= 0, 1.0, 0.0) / jnp.maximum(jnp.sum(rows >= 0), 1)
        return jnp.where(among, jnp.einsum("krt,r->kt", shares, weight), 0.0)


def redundancy(obs: Observation, threshold: float) -> Scores:
    """The mean cosine of each key with the others, as shares of all tokens. No T x T matrix is built."""
    k, length = obs.k.astype(jnp.float32), obs.k.shape[1]
    unit = jnp.where(obs.valid[:, None], k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-8), 0.0)
    # Where no key is similar, the authors' code leaves out the first one.
    first, size = jnp.argmax(obs.valid), min(_BLOCK, length)

    def add(i: Int[Array, ""], total: Float[Array, "K T"]) -> Float[Array, "K T"]:
        begin = jnp.minimum(i * size, length - size)
        row = begin + jnp.arange(size)
        rows = jax.lax.dynamic_slice_in_dim(unit, begin, size, axis=1)
        cosine = jnp.einsum("krh,kth->krt", rows, unit, precision="highest")
        cosine = jnp.where(row[:, None] == jnp.arange(length), 0.0, cosine)
        last = jnp.max(jnp.where(cosine > threshold, jnp.arange(length), first), axis=-1, keepdims=True)
        counted = (jnp.arange(length) != last) & (row >= i * size)[:, None]  # the last block begins earlier
        return total + jnp.sum(jnp.where(counted, cosine, 0.0), axis=1)

    total = jax.lax.fori_loop(0, -(-length // size), add, jnp.zeros(k.shape[:2]))
    mean = total / jnp.maximum(jnp.sum(obs.valid), 1)
    return jax.nn.softmax(mean, axis=-1, where=obs.valid)
