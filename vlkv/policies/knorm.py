from __future__ import annotations

import jax.numpy as jnp

from vlkv.compression.policy import Facts, Observation, Policy, Scores


class Knorm(Policy):
    """The negative L2 norm of each key (Devoto et al. 2024, Sec. 3): keys of small norm receive much attention."""

    facts = Facts(observes=False)

    def score(self, obs: Observation) -> Scores:
        return -jnp.linalg.norm(obs.k.astype(jnp.float32), axis=-1)
