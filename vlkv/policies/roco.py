"""RoCo: tokens whose attention varies are spared, and of the steady ones the least attended go."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.observe import Observation, column_sums, group_mean, last, ordinal, top
from vlkv.policies.policy import Policy, Statistics, policy


@policy
class RoCo(Policy):
    """Mean and standard deviation of the attention that each token receives (Ren & Zhu 2024).

    Both run over the rows that may see the token, and over the query heads of its key head, so that early tokens gain
    nothing by their age. The tokens with the largest deviation stay; of the others, with the lowest, those with the
    lowest mean go. LOOK-M's and CSP's code call another class RoCo. This is the prefill half; deletion during
    decoding is not implemented yet.

    Attributes:
        spread: share of what the recent tokens leave of the budget that goes to the largest deviations.
        recent: last tokens that always stay.
    """

    spread: float = 0.5
    recent: int = 10
    paper = "Ren & Zhu 2024, On the Efficacy of Eviction Policy for Key-Value Constrained Generative LM Inference"
    stages = "score, rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("spread", 0 <= self.spread <= 1, "must lie in [0, 1]")
        self.check("recent", self.recent >= 0, "must not be negative")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """The mean."""
        return self.moment(obs, "sum")

    def moment(self, obs: Observation, statistic: str) -> Float[Array, "K T"]:
        """Column sums of A or of its square, per row that sees the token."""
        rows = jnp.sum(obs.valid) - ordinal(obs.valid)
        return group_mean(column_sums(obs, statistic=statistic), obs.k.shape[0]) / jnp.maximum(rows, 1)

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Recent tokens."""
        return last(obs.valid, self.recent)

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """`deviation`: 0 where it is within rounding of the mean."""
        variance = self.moment(obs, "square") - scores**2
        return {"deviation": jnp.sqrt(jnp.where(variance > 1e-6 * scores**2, variance, 0.0))}

    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """The largest deviations, then by mean."""
        spared = top(statistics["deviation"], candidates, budgets.share(self.spread, count, scores.shape[1]))
        return jnp.where(spared, jnp.inf, scores), count
