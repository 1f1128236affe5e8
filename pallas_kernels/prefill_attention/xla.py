"""prefill_attention in plain XLA, block by block: differentiable, any backend.

Axes: B batch · T queries · S keys · N query heads · K key heads · G = N/K · H head dim.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Logits of one block of queries, in elements: what prefill attention adds to the peak memory.
_BLOCK_ELEMENTS = 2**24
_GROUPS = 8  # causal: queries in G static groups, each over its own prefix of keys, waste 1/(2G) of the work


def prefill_attention_xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"] | None,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """As `prefill_attention` says; a query without a key gets an average of nothing in particular."""
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, -1, head_dim).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, K, T, H]
    block = _block_size(batch * heads * length, length)
    blocks = -(-length // block)
    per_group = -(-blocks // _GROUPS) if causal else blocks
    q = jnp.pad(q, [(0, 0)] * 3 + [(0, blocks * block - length), (0, 0)])

    out = []
    for first in range(0, blocks, per_group):
        last = min(first + per_group, blocks)
        seen = min(last * block, length) if causal else length
        part = q[..., first * block : last * block, :].reshape(*q.shape[:3], last - first, block, head_dim)
        places = jnp.arange(first * block, last * block).reshape(-1, block)
        attend = _attend(k[:, :, :seen], v[:, :, :seen], None if valid is None else valid[:, :seen], causal)
        if last - first == 1:
            out.append(attend((jnp.squeeze(part, 3), places[0])))
        else:
            parts = jax.lax.map(attend, (jnp.moveaxis(part, 3, 0), places))
            out.append(jnp.moveaxis(parts, 0, 3).reshape(*q.shape[:3], -1, head_dim))
    joined = jnp.concatenate(out, axis=3)[..., :length, :]
    return joined.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


def _block_size(rows: int, length: int) -> int:
    """The largest power of two whose logits stay within bounds, at least 16 and at most 512."""
    fit = max(16, _BLOCK_ELEMENTS // max(rows, 1))
    return min(512, 2 ** int(math.log2(fit)), max(length, 1))


def _attend(k, v, valid, causal):
    # Recomputed in the backward pass: training must not keep the probabilities of every block either.
    @jax.checkpoint
    def block(args):
        q, places = args  # [B, K, G, block, H], [block]
        logits = jnp.einsum("bkgth,bksh->bkgts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        allowed = jnp.ones((1, 1, logits.shape[-1]), bool)
        if causal:
            allowed = allowed & (jnp.arange(logits.shape[-1]) <= places[:, None])
        if valid is not None:
            allowed = allowed & valid[:, None]
        logits = jnp.where(allowed[:, None, None], logits, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        return jnp.einsum("bkgts,bksh->bkgth", weights, v)

    return block
