"""RoCo: tokens whose attention varies are spared, and of the steady ones the least attended go."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import budgets
from vlkv.memory import Memory, evict
from vlkv.observe import Observation, column_sums, group_mean, last, ordinal, top
from vlkv.policies.policy import Policy, Statistics, policy


@policy
class RoCo(Policy):
    """Mean and standard deviation of the attention that each token receives (Ren & Zhu 2024).

    Both run over the rows that may see the token, and over the query heads of its key head, so that early tokens gain
    nothing by their age. The tokens with the largest deviation stay; of the others, with the lowest, those with the
    lowest mean go. LOOK-M's and CSP's code call another class RoCo.

    While decoding every step counts as one more row, and what is over the budget of the prompt leaves: of the entries
    outside the recent window and not among the largest deviations, the one with the lowest mean. Under scope="vision"
    new tokens are text, so nothing leaves.

    Attributes:
        spread: share of what the recent tokens leave of the budget that goes to the largest deviations.
        recent: last tokens that always stay.
        evict: whether to go on while decoding; False keeps what prefill has chosen, and all new tokens.
    """

    spread: float = 0.5
    recent: int = 10
    evict: bool = True
    paper = "Ren & Zhu 2024, On the Efficacy of Eviction Policy for Key-Value Constrained Generative LM Inference"
    stages = "score, rank, step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("spread", 0 <= self.spread <= 1, "must lie in [0, 1]")
        self.check("recent", self.recent >= 0, "must not be negative")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """The mean."""
        return self.moment(obs, "sum")

    def moment(self, obs: Observation, statistic: str) -> Float[Array, "K T"]:
        """Column sums of A or of its square, per row that sees the token."""
        return group_mean(column_sums(obs, statistic=statistic), obs.k.shape[0]) / self.rows(obs)

    def rows(self, obs: Observation) -> Int[Array, " T"]:
        """How many rows see each token."""
        return jnp.maximum(jnp.sum(obs.valid) - ordinal(obs.valid), 1)

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Recent tokens."""
        return last(obs.valid, self.recent)

    def statistics(self, obs: Observation, scores: Float[Array, "K T"]) -> Statistics:
        """`deviation` of the attention received."""
        return {"deviation": deviation(scores, self.moment(obs, "square"))}

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

    @property
    def acts(self) -> bool:
        """While tokens of all kinds count."""
        return self.evict and self.scope == "all"

    @property
    def evicts(self) -> bool:
        """If it acts."""
        return self.acts

    def remember(self, obs: Observation, scores: Float[Array, "K T"]) -> dict[str, Float[Array, "K T"]]:
        """Mean, mean square, and of how many rows."""
        rows = jnp.broadcast_to(self.rows(obs).astype(jnp.float32), scores.shape)
        return {"mean": scores, "square": self.moment(obs, "square"), "rows": rows}

    def step(self, memory: Memory, mass: Float[Array, "N E"]) -> Memory:
        """Counts this step's attention and lets one entry go."""
        heads, most = memory.stored.shape
        rows = memory.values["rows"] + memory.stored
        mean, square = (
            memory.values[name] + jnp.where(memory.stored, x - memory.values[name], 0.0) / jnp.maximum(rows, 1)
            for name, x in (("mean", group_mean(mass, heads)), ("square", group_mean(mass**2, heads)))
        )
        memory = dataclasses.replace(memory, values={"mean": mean, "square": square, "rows": rows})
        count = jnp.sum(memory.stored, axis=-1)
        recent = jnp.minimum(self.recent, memory.capacity)
        old = memory.stored & (memory.rank < (count - recent)[:, None])
        spared = top(deviation(mean, square), old, budgets.share(self.spread, memory.capacity - recent, most))
        return evict(memory, old & ~spared & (count > memory.capacity)[:, None], mean)


def deviation(mean: Float[Array, "K T"], square: Float[Array, "K T"]) -> Float[Array, "K T"]:
    """From the mean and the mean of the squares; 0 where it is within rounding of the mean."""
    variance = square - mean**2
    return jnp.sqrt(jnp.where(variance > 1e-6 * mean**2, variance, 0.0))
