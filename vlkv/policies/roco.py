from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention_mass import Statistic
from vlkv.cache.decode_state import DecodeState, evict, evictable
from vlkv.compression import budgets
from vlkv.compression.observe import Observation, column_sums, columns, group_mean, row_counts
from vlkv.compression.option_types import Count, Unit
from vlkv.compression.policy import DecodingStages, Facts, Mask, PerHead, Scores, Statistics, those
from vlkv.masks import last, top


class RoCo(DecodingStages):
    """Mean and standard deviation of the attention that each token receives (Ren & Zhu 2024).

    Both are taken over the rows that can attend to the token and the query heads of its key head. The tokens with the
    largest deviation are kept; of the others, those with the lowest mean are dropped. While decoding, every step counts
    as one more row, and a head with more entries than its budget evicts in the same way. With scope="vision" nothing is
    evicted, because new tokens are text.

    Attributes:
        spread: share of the budget without recent tokens that is for the largest deviations.
        recent: number of last tokens that are always kept.
        evict: False: nothing is evicted while decoding.
    """

    spread: Unit = 0.5
    recent: Count = 10
    evict: bool = True
    facts = Facts(stages="score, rank, step")
    measures = columns("sum", "square")
    ranked_by = ("scores", "deviation")
    idle = property(lambda self: those(rank=self.spread == 0, step=not self.evict or self.scope == "vision"))

    def score(self, obs: Observation) -> Scores:
        return self.moment(obs, "sum")

    def moment(self, obs: Observation, statistic: Statistic) -> Float[Array, "K T"]:
        """Column sums of the attention ("sum") or of its square ("square"), per row that can attend to the token."""
        return group_mean(column_sums(obs, statistic=statistic), obs.k.shape[0]) / row_counts(obs)

    def protect(self, obs: Observation) -> Mask:
        return last(obs.valid, self.recent)

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        return {"deviation": deviation(scores, self.moment(obs, "square"))}

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        spared = top(statistics["deviation"], candidates, budgets.share(self.spread, count, scores.shape[1]))
        return jnp.where(spared, jnp.inf, scores), count

    def decode_values(self, obs: Observation, scores: Scores) -> dict[str, Scores]:
        rows = jnp.broadcast_to(row_counts(obs).astype(jnp.float32), scores.shape)
        return {"mean": scores, "square": self.moment(obs, "square"), "rows": rows}

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        heads = state.stored.shape[0]
        rows = state.values["rows"] + state.stored
        mean, square = (
            state.values[name] + jnp.where(state.stored, x - state.values[name], 0.0) / jnp.maximum(rows, 1)
            for name, x in (("mean", group_mean(mass, heads)), ("square", group_mean(mass**2, heads)))
        )
        state = dataclasses.replace(state, values={"mean": mean, "square": square, "rows": rows})
        recent = jnp.minimum(self.recent, state.budget)
        old = evictable(state, recent)
        count = budgets.unbounded_share(self.spread, state.budget - recent)
        spared = top(deviation(mean, square), old, count, state.place)
        return evict(state, old & ~spared, mean)


def deviation(mean: Float[Array, "K T"], square: Float[Array, "K T"]) -> Float[Array, "K T"]:
    """The standard deviation from the mean and the mean square; 0 if it is smaller than the rounding error."""
    variance = square - mean**2
    return jnp.sqrt(jnp.where(variance > 1e-6 * mean**2, variance, 0.0))
