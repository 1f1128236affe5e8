from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.cache.decode_state import DecodeState, evict, evictable
from vlkv.compression import budgets
from vlkv.compression.observe import Observation, column_sums, columns, group_mean
from vlkv.compression.option_types import Count, Magnitude
from vlkv.compression.policy import DecodingStages, Scores


class H2O(DecodingStages):
    """Scores are the attention that a token has received so far, per head (Zhang et al. 2023, Sec. 4.1).

    Half of the budget is for the most recent tokens. While decoding, every step adds its attention, and a head with
    more entries than it has kept of the prompt evicts the one with the least attention outside the recent window. With
    scope="vision" nothing is evicted, because new tokens are text.

    Attributes:
        recent: an int: number of recent tokens that are kept; a float: their share of a head's budget in the layer,
            rounded down (0.75 in A-VL's baseline); None: half of the budget. So 1 is one token, and 1.0 the whole
            budget.
        evict: False: nothing is evicted while decoding.
    """

    recent: Count | Magnitude | None = None
    evict: bool = True
    measures = columns("sum")
    idle = property(lambda self: () if self.evict and self.scope == "all" else ("step",))

    def __post_init__(self) -> None:
        super().__post_init__()
        share = not isinstance(self.recent, float) or self.recent <= 1
        self.check("recent", share, "must be a whole number of at least 0, a share in [0, 1], or None")

    def score(self, obs: Observation) -> Scores:
        return group_mean(column_sums(obs), obs.k.shape[0])

    def recent_of(self, budget: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        if isinstance(self.recent, int):
            return jnp.full_like(budget, self.recent)
        return budgets.unbounded_share(0.5 if self.recent is None else self.recent, budget)

    def decode_values(self, obs: Observation, scores: Scores) -> dict[str, Scores]:
        return {"mass": scores}

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        heads = state.stored.shape[0]
        total = state.values["mass"] + group_mean(mass, heads)
        state = dataclasses.replace(state, values={"mass": total})
        return evict(state, evictable(state, self.recent_of(state.budget)), total)
