from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.frequencies import low_pass
from vlkv.compression.option_types import Unit
from vlkv.compression.policy import Budgets, Facts, Observation, PerLayer, Policy, Scores, Statistics


class FlashCache(Policy):
    """Outliers from a low-pass filter along the tokens (Yang et al. 2025, "Outlier KVs").

    The base of keys and of values has the lowest frequencies of a cosine transform along the prompt. A token's score is
    its squared deviation from the base, and budgets are proportional to the energy that is not in the base.

    Attributes:
        cutoff: share of the frequencies that form the base; the paper finds 0.1 to 0.2 best.
    """

    cutoff: Unit = 0.2
    facts = Facts(
        paper="Yang et al. 2025, Revisiting Multimodal KV Cache Compression: A Frequency-Domain-Guided"
        " Outlier-KV-Aware Approach (FlashCache)",
        equations="Sec. 3",
        source="arXiv:2511.16786",
        stages="score, allocate",
        observes=False,
        capped=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("cutoff", self.cutoff < 1, "must be less than 1, or nothing deviates from the low frequencies")

    def deviations(self, obs: Observation, x: Float[Array, "K T H"]) -> Float[Array, "K T"]:
        """Squared deviation of each valid token from the base, summed over the channels."""
        highest = budgets.unbounded_share(self.cutoff, jnp.sum(obs.valid))
        base = low_pass(x, obs.valid, highest, frequencies=1 + int(self.cutoff * x.shape[1] + 1e-6))
        return jnp.where(obs.valid, jnp.sum((x.astype(jnp.float32) - base) ** 2, axis=-1), 0.0)

    def score(self, obs: Observation) -> Scores:
        return (self.deviations(obs, obs.k) + self.deviations(obs, obs.v)) / obs.k.shape[-1]

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:

        def share(x: Float[Array, "K T H"]) -> Float[Array, ""]:
            energy = jnp.sum(jnp.where(obs.valid[:, None], x.astype(jnp.float32), 0.0) ** 2)
            return jnp.sum(self.deviations(obs, x)) / jnp.maximum(energy, 1e-30)

        return {"outliers": share(obs.k) + share(obs.v)}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        share = statistics["outliers"]
        real = total * share / jnp.maximum(jnp.sum(share), 1e-30)
        return budgets.apportion(real, total, floor=jnp.minimum(1, most), ceiling=most)
