"""Random: tokens drawn uniformly, a strong baseline on coarse questions."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from vlkv.observe import Observation, ordinal
from vlkv.policies.policy import Policy, policy


@policy
class Random(Policy):
    """A fresh uniform draw for every layer and head. Needs the key= of `generate` or `select`."""

    paper = "baseline"
    needs_key = True

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Uniform in [0, 1), drawn per ordinal of the token, so that padding changes nothing."""
        return jax.random.uniform(obs.key, obs.k.shape[:2])[:, ordinal(obs.valid)]
