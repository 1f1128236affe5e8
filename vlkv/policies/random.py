from __future__ import annotations

import jax
import jax.numpy as jnp

from vlkv.compression.option_types import Scope
from vlkv.compression.policy import Facts, Observation, Policy, Scores
from vlkv.masks import ordinal


class Random(Policy):
    """Scores are drawn uniformly for every layer and head. For coarse questions this is a strong baseline.

    Needs the key= of `generate` or `select`.
    """

    facts = Facts(observes=False)
    needs_key = True

    def score(self, obs: Observation) -> Scores:
        """Uniform in [0, 1). Draws depend on the number of the token among the valid ones, so not on padding."""
        root = obs.key
        assert root is not None  # checked by select and generate
        kv_heads, length, _ = obs.k.shape
        keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.arange(length))
        return jax.vmap(lambda key: jax.random.uniform(key, (kv_heads,)))(keys)[ordinal(obs.valid)].T


class ImgRandom(Random):
    """Random among the vision tokens, with all text kept: a baseline for methods that compress images."""

    scope: Scope = "vision"
