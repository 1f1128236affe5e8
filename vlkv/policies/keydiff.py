from __future__ import annotations

import jax
import jax.numpy as jnp

from vlkv.compression import matching
from vlkv.compression.policy import Facts, Observation, Policy, Scores


class KeyDiff(Policy):
    """The negative cosine between each key and the mean of all keys of its head (Park et al. 2025, Sec. 3, Alg. 1).

    The mean is that of the keys scaled to unit norm. No queries and no attention are needed.
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
