"""Elastic Cache: merges every dropped entry into the nearest kept entry."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from typing_extensions import override

from vlkv.cache.decode_state import DecodeState
from vlkv.compression import merging
from vlkv.compression.fixed_distance import allowed_entries, evict_at_distance, share_bounds
from vlkv.compression.observe import Observation, column_sums, columns, head_mean
from vlkv.compression.option_types import Count, Positive, Variant
from vlkv.compression.policy import DecodingStages, Facts, Statistics
from vlkv.masks import first, last, ordinal


class ElasticCache(DecodingStages):
    """Scores are column sums averaged over heads; dropped entries are merged into kept ones (Liu et al. 2024).

    A dropped entry is merged into the kept entry with the nearest index (ties: the lower one), which becomes the
    mean; keys and values in the same way, in every head. Entries may be merged into text tokens too.

    While decoding, a layer keeps the same share of all tokens as of the prompt. The entry at a fixed distance from the
    newest one is evicted, or the middle one if there are not enough entries. With scope="vision" nothing is evicted,
    because new tokens are text.

    The published code uses the permutation of argsort as ranks, so it keeps a different set, and one token fewer. It
    forgets the sinks when it counts the dropped tokens, so it merges tokens that lie `sinks` places away, and it does
    not merge into sinks or recent tokens. While decoding it deletes the entry whose rank by age is `distance` before
    the end of the prompt's entries. All this is variant="released".

    Attributes:
        sinks: number of first tokens that are always kept.
        recent: number of last tokens that are always kept.
        merging: "position", or "none" to drop entries without merging.
        distance: while decoding, the `distance`-th newest entry is evicted; None: nothing is evicted.
        variant: "paper", or "released" for the published code.
    """

    sinks: Count = 1
    recent: Count = 1
    merging: Literal["position", "none"] = "position"
    distance: Positive | None = 25
    variant: Variant = "paper"
    facts = Facts(
        paper="Liu et al. 2024, Efficient Inference of Vision Instruction-Following Models with Elastic Cache",
        stages="score, rank, merge, step",
        measures=columns("sum"),
    )

    @property
    @override
    def follows_paper(self) -> bool:
        return self.variant == "paper"

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Column sums of attention, averaged over heads."""
        return head_mean(column_sums(obs), obs.k.shape[0])

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Sinks and recent tokens."""
        return first(obs.valid, self.sinks) | last(obs.valid, self.recent)

    def rank(
        self,
        scores: Float[Array, "K T"],
        statistics: Statistics,
        candidates: Bool[Array, " T"],
        count: Int[Array, " K"],
    ) -> tuple[Float[Array, "K T"], Int[Array, " K"]]:
        """By score; released: by the permutation of argsort, and one fewer."""
        if self.variant == "paper":
            return scores, count
        number = ordinal(candidates)
        ascending = jnp.argsort(jnp.where(candidates, scores, jnp.inf), axis=1, stable=True)
        permutation = number[ascending][:, jnp.maximum(number, 0)].astype(jnp.float32)
        short = (count > 1) & (count < jnp.sum(candidates))
        return permutation, count - short

    @property
    @override
    def merges(self) -> bool:
        return self.merging != "none"

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """The mean of each kept entry and the dropped entries that are nearest to it."""
        if self.merging == "none":
            return k, v
        receives, gone = kept, merging.dropped(kept, scores)
        if self.variant == "released":
            inside = jnp.isfinite(scores[0])
            if self.scope == "all":
                receives = kept & ~(first(inside, self.sinks) | last(inside, self.recent))
                gone = jnp.roll(gone, -self.sinks, axis=1)
            gone = gone & inside & jnp.any(receives, axis=1, keepdims=True)
        target = merging.nearest_place(receives)
        return merging.fold(k, k, target, gone), merging.fold(v, v, target, gone)

    @property
    @override
    def updater(self) -> DecodingStages | None:
        return self if self.distance is not None and self.scope == "all" else None

    def decode_slots(self, state: DecodeState) -> Int[Array, " K"]:
        """The share of all tokens that may be seen, and one new entry."""
        return allowed_entries(self.decode_budget(state), state, state.new_tokens) + 1

    @override
    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int]:
        return share_bounds(self, kept, longest, layers=layers, most=vision + text, new_tokens=new_tokens)

    def step(self, state: DecodeState, mass: Float[Array, "N E"]) -> DecodeState:
        """Evicts one entry of each head that has more than its share of all tokens."""
        assert self.distance is not None
        moving = self.variant == "paper"
        return evict_at_distance(state, self.distance, budget=self.decode_budget(state), moving=moving)

    def decode_budget(self, state: DecodeState) -> Int[Array, " K"]:
        """The budget of prefill; the published code keeps one entry fewer."""
        if self.variant == "paper":
            return state.budget
        return jnp.minimum(state.budget + 1, state.vision + state.text)
