from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Mask, Policy, Scores
from vlkv.compression.rotation import mean_rotation, rotated, unrotated
from vlkv.config import RopeConfig


class TriAttention(Policy):
    """Scores of keys by the queries that are likely to follow, selected again while decoding (Mao et al. 2026).

    Queries before rotation are concentrated around a centre. So the logit of a key at a distance is a sum of cosines,
    one for each pair of channels, which is averaged over distances in the future. The spread of the queries around the
    centre adds the norm of each pair. Scores of a query head are standardised, and a key head has the largest.

    Attributes:
        interval: number of new tokens after which entries are selected again.
        ahead: bound on the distances in the future: 1, 2, 4 ... up to this.
        keep_prompt: whether all tokens of the prompt are kept. Of a prompt that exceeds the budget, the last are.
    """

    interval: Positive = 128
    ahead: Positive = 65536
    keep_prompt: bool = True
    uses = ("rotation",)
    every = property(lambda self: self.interval)

    def protect(self, obs: Observation) -> Mask:
        return obs.valid & ~obs.is_answer if self.keep_prompt else jnp.zeros_like(obs.valid)

    def score(self, obs: Observation) -> Scores:
        """The centre is that of the known queries: of the prompt, or of the tokens since the last selection."""
        context, (kv_heads, _, head_dim) = obs.context, obs.k.shape
        assert context is not None
        rows, k, rope = obs.observers[:, None], obs.k.astype(jnp.float32), context.rope
        q, count = unrotated(obs.q, context), jnp.maximum(jnp.sum(obs.observers), 1)
        centre = jnp.sum(jnp.where(rows, q, 0.0), axis=1) / count  # [N, H]
        norm = jnp.sum(jnp.where(rows, pair_norms(q, rope), 0.0), axis=1) / count
        distances = 2 ** jnp.arange(self.ahead.bit_length())
        toward = rotated(centre, mean_rotation(context, obs.valid, distances, head_dim), context)
        spread = rope.scale * (norm - pair_norms(centre, rope))
        toward, spread = (x.reshape(kv_heads, -1, x.shape[-1]) for x in (toward, spread))
        scores = jnp.einsum("kgh,kth->kgt", toward, k, precision="highest")
        scores += jnp.einsum("kgp,ktp->kgt", spread, pair_norms(k, rope), precision="highest")
        among = obs.in_scope & ~self.protect(obs)
        mean = jnp.mean(scores, axis=-1, keepdims=True, where=among)
        deviation = jnp.std(scores, axis=-1, keepdims=True, where=among)
        return jnp.where(among, jnp.max((scores - mean) / jnp.maximum(deviation, 1e-6), axis=1), 0.0)


def pair_norms(x: Float[Array, "*batch H"], rope: RopeConfig) -> Float[Array, "*batch pairs"]:
    """The norm of each pair of channels that is rotated together."""
    channels = x.shape[-1] if rope.channels is None else rope.channels
    if rope.neighbours:
        return jnp.hypot(x[..., 0:channels:2], x[..., 1:channels:2])
    return jnp.hypot(x[..., : channels // 2], x[..., channels // 2 : channels])
