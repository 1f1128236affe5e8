from __future__ import annotations

import jax.numpy as jnp

from vlkv.compression.policy import Facts, Observation, Policy, Scores


class Full(Policy):
    """Keeps everything: the uncompressed cache, the baseline of every table."""

    keep: float | None = 1.0
    facts = Facts(stages="none", selects=False, observes=False)
    own_keep = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("keep", self.keep == 1.0, "must be 1: this is the full cache")

    def score(self, obs: Observation) -> Scores:
        return jnp.zeros(obs.k.shape[:2])
