"""KeyDiff: keeps the tokens whose keys differ most from the mean key."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vlkv.compression import matching
from vlkv.compression.observe import Observation
from vlkv.compression.policy import Facts, Policy
from vlkv.compression.stages import Scores


class KeyDiff(Policy):
    """The negative cosine between each key and the mean of all keys of its head (Park et al. 2025, Sec. 3, Alg. 1).

    The mean is that of the keys scaled to unit norm, over all valid tokens. The method needs neither queries nor
    attention, so it does not depend on the question.
    """

    facts = Facts(
        paper="Park et al. 2025, KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in"
        " Resource-Constrained Environments",
        equations="Sec. 3, Alg. 1",
        source="arXiv:2504.15364",
        observes=False,
    )

    def score(self, obs: Observation) -> Scores:
        product, length = jax.vmap(matching.along_mean, (0, None))(obs.k, obs.valid)
        return -product / jnp.maximum(length, 1e-12)[:, None]
