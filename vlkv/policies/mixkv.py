from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression import matching
from vlkv.compression.policy import Mask, Observation, Scores
from vlkv.policies.snapkv import SnapKV


class MixKV(SnapKV):
    """Mixes importance (attention, norm of the value) and diversity (keys unlike the mean key) (Liu et al. 2025).

    Norms and diversity (as in KeyDiff) are scaled to [0, 1] over the candidates of a head, and then to the mean of its
    SnapKV scores. The weight of diversity is the head's redundancy: the mean cosine of two different keys of the
    prompt. Options are those of SnapKV.
    """

    def score(self, obs: Observation) -> Scores:
        attention, candidates = super().score(obs), self.candidates(obs)
        product, length = jax.vmap(matching.along_mean, (0, None))(obs.k, obs.valid)
        # The mean cosine of all pairs is the square of this length; the pairs of a key with itself are taken out.
        count = jnp.sum(obs.valid)
        redundancy = (count * length**2 - 1) / jnp.maximum(count - 1, 1)
        weight = jnp.clip(redundancy, 0, 1)[:, None]
        average = jnp.mean(attention, axis=1, keepdims=True, where=candidates)

        def scaled(x: Float[Array, "K T"]) -> Float[Array, "K T"]:
            x = unit_range(x, candidates)
            return x * average / (jnp.mean(x, axis=1, keepdims=True, where=candidates) + 1e-8)

        norm = jnp.linalg.norm(obs.v.astype(jnp.float32), axis=-1)
        mixed = weight * scaled(-product) + (1 - weight) * (attention + scaled(norm))
        return jnp.where(candidates, mixed, 0.0)


def unit_range(x: Float[Array, "K T"], among: Mask) -> Float[Array, "K T"]:
    """Scales the values of each head so that those in the mask reach from 0 to 1; equal values become 0."""
    low = jnp.min(x, axis=1, keepdims=True, where=among, initial=jnp.inf)
    high = jnp.max(x, axis=1, keepdims=True, where=among, initial=-jnp.inf)
    return jnp.where(among, (x - low) / (high - low + 1e-8), 0.0)
