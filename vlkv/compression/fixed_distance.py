"""Base class of PrefixKV and Elastic Cache: while decoding, they evict at a fixed distance from the newest entry.

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
    """Scores are column sums averaged over heads. While decoding, a layer keeps the same share of all tokens as of the
    prompt.

    Of n tokens so far it stores ceil(share x n). If it has more, the entry at a fixed distance from the newest one is
    evicted, or the middle one if there are not enough entries. With scope="vision" nothing is evicted, because new
    tokens are text.

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
        return state  # a short prompt grows by its share, also with `budget=`

    def decode_budget(self, state: DecodeState) -> Int[Array, " K"]:
        """Number of prompt entries that defines the share: this number divided by the length of the prompt."""
        return state.budget

    def allowed(self, state: DecodeState, new: Int[Array, ""] | int) -> Int[Array, " K"]:
        """The number of entries to store after `new` new tokens: ceil(share x (prompt + new))."""
        budget, prompt = self.decode_budget(state), jnp.maximum(state.vision + state.text, 1)
        return budget - (-(budget * new) // prompt)  # budget + ceil(budget x new / prompt): this product fits 32 bits

    def decode_slots(self, state: DecodeState) -> Int[Array, " K"]:
        """The number of entries to store at the end, and one for the arriving token."""
        return self.allowed(state, state.new_tokens) + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int]:
        """The largest bounds of all prompts of at least 1 / keep tokens.

        A shorter prompt has a larger share, because every layer keeps at least one token. It gets no more slots than
        the others, and `step` evicts earlier.
        """
        most = vision + text
        lengths = np.arange(max(1, min(most, 0 if self.keep is None else math.ceil(1 / self.keep))), most + 1)
        total = np.asarray(stage_of(self, "total")(layers * lengths, layers=layers, text=most), np.int64)
        per_layer = -(-total // layers)
        # Beyond what the longest prompt keeps, which is included in `kept` and `longest`.
        growth = int(np.max(total + total * new_tokens // lengths) - total[-1])
        # A layer that may keep the whole prompt may also keep all new tokens.
        layer_growth = (
            int(np.max(per_layer - (-per_layer * new_tokens // lengths)) - per_layer[-1])
            if longest < most
            else new_tokens
        )
        return kept + growth + 2 * layers, longest + layer_growth + 1

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        """Evicts one entry of each head that has more than `allowed`, or no free slot for the next token."""
        assert self.distance is not None
        allowed = self.allowed(state, state.steps)
        if state.reuses:
            allowed = jnp.minimum(allowed, state.slots - 1)
        count = jnp.sum(state.stored, axis=-1)
        # Entries are numbered by age. Published code counts from the end of the prompt, so that it evicts the same
        # number at every step.
        end = count if self.variant == "paper" else self.decode_budget(state)
        leaving = jnp.where(end > self.distance, end - self.distance, end // 2)
        over = state.stored & (state.rank == leaving[:, None]) & (count > allowed)[:, None]
        return evict(state, over, state.rank.astype(jnp.float32))
