"""Random: tokens drawn uniformly, a strong baseline on coarse questions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.observe import Observation, ordinal
from vlkv.policies.policy import Policy, Scope, policy


@policy
class Random(Policy):
    """A fresh uniform draw for every layer and head. Needs the key= of `generate` or `select`."""

    paper = "baseline"
    needs_key = True

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Uniform in [0, 1), drawn per ordinal of the token, so that padding changes nothing."""
        root = obs.key
        assert root is not None  # select and generate have checked
        kv_heads, length, _ = obs.k.shape
        keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.arange(length))
        return jax.vmap(lambda key: jax.random.uniform(key, (kv_heads,)))(keys)[ordinal(obs.valid)].T


@policy
class ImgRandom(Random):
    """Random among the vision tokens, all text kept: what any method for images must beat."""

    scope: Scope = "vision"
