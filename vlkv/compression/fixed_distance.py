"""Base class of methods that evict at a fixed distance from the newest entry while decoding: PrefixKV, Elastic Cache.

Unbatched. Axes: K key heads · T tokens · E entries.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from vlkv.cache.decode_state import DecodeState, evict
from vlkv.compression.observe import Observation, column_sums, columns, head_mean
from vlkv.compression.option_types import Count, Positive, Variant
from vlkv.compression.policy import DecodingStages, Facts, stage_of
from vlkv.masks import first, last


class FixedDistance(DecodingStages):
    """Column sums averaged over heads; while decoding, a layer keeps the same share of all tokens as of the prompt.

    Above ceil(share x seen) entries, the one at a fixed distance from the newest is evicted, or the middle one if there
    are not enough entries. With scope="vision" nothing is evicted, because new tokens are text.

    Attributes:
        sinks: number of first tokens that are always kept.
        recent: number of last tokens that are always kept.
        distance: while decoding, the `distance`-th newest entry is evicted; None: nothing is evicted.
        variant: "paper", or "released": while decoding, `distance` is counted back from the last prompt entry, so that
            the entry whose rank by age is budget - distance is evicted at every step.
    """

    sinks: Count = 1
    recent: Count = 1
    distance: Positive | None = 25
    variant: Variant = "paper"
    facts = Facts(stages="score, step")
    measures = columns("sum")
    needs = property(lambda self: () if self.variant == "paper" else ("whole prompt",))
    idle = property(lambda self: () if self.distance is not None and self.scope == "all" else ("step",))

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Column sums of attention, averaged over heads."""
        return head_mean(column_sums(obs), obs.k.shape[0])

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Sinks and recent tokens."""
        return first(obs.valid, self.sinks) | last(obs.valid, self.recent)

    @override
    def begin(self, state: DecodeState) -> DecodeState:
        return state  # also with `budget=`, the share of the prompt counts

    def decode_budget(self, state: DecodeState) -> Int[Array, " K"]:
        """Entries of the prompt, of which a layer keeps the same share of all tokens."""
        return state.budget

    def allowed(self, state: DecodeState, new: Int[Array, ""] | int) -> Int[Array, " K"]:
        """ceil(budget / prompt x tokens so far) after `new` new tokens."""
        budget, prompt = self.decode_budget(state), jnp.maximum(state.vision + state.text, 1)
        return budget - (-(budget * new) // prompt)  # in this form, no product exceeds 32 bits

    def decode_slots(self, state: DecodeState) -> Int[Array, " K"]:
        """The share of all tokens that may be seen, and one new entry."""
        return self.allowed(state, state.new_tokens) + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int]:
        """Bounds on the share. Prompts of fewer than 1 / keep tokens, of which every layer keeps one, get no more."""
        most = vision + text
        seen = np.arange(max(1, min(most, 0 if self.keep is None else math.ceil(1 / self.keep))), most + 1)
        total = np.asarray(stage_of(self, "total")(layers * seen, layers=layers, text=most), np.int64)
        per_layer = -(-total // layers)
        growth = int(np.max(total + total * new_tokens // seen) - total[-1])
        longer = (
            int(np.max(per_layer - (-per_layer * new_tokens // seen)) - per_layer[-1]) if longest < most else new_tokens
        )
        return kept + growth + 2 * layers, longest + longer + 1

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        """Evicts one entry of each head that has more than its share, or no slot left for the next entry."""
        assert self.distance is not None
        allowed = self.allowed(state, state.steps)
        if state.reuses:
            allowed = jnp.minimum(allowed, state.slots - 1)
        count = jnp.sum(state.stored, axis=-1)
        end = count if self.variant == "paper" else self.decode_budget(state)
        leaving = jnp.where(end > self.distance, end - self.distance, end // 2)
        over = state.stored & (state.rank == leaving[:, None]) & (count > allowed)[:, None]
        return evict(state, over, state.rank.astype(jnp.float32))
