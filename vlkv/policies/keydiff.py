from __future__ import annotations

import jax
import jax.numpy as jnp

from vlkv.compression import matching
from vlkv.compression.policy import Facts, Observation, Policy, Scores


class KeyDiff(Policy):
    """The negative cosine between each key and the mean of all keys of its head (Park et al. 2025, Sec. 3, Alg. 1).

    The mean is that of the keys scaled to unit norm. No queries and no attention are needed.
    """

    facts = Facts(observes=False)

    def score(self, obs: Observation) -> Scores:
        product, length = jax.vmap(matching.along_mean, (0, None))(obs.k, obs.valid)
        return -product / jnp.maximum(length, 1e-12)[:, None]
