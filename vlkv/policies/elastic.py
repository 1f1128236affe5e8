from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int
from typing_extensions import override

from vlkv.cache.decode_state import DecodeState
from vlkv.compression import merging
from vlkv.compression.fixed_distance import FixedDistance
from vlkv.compression.policy import Entries, Facts, Kept, Mask, PerHead, Scores, Statistics, those
from vlkv.masks import first, last, ordinal


class ElasticCache(FixedDistance):
    """Scores are column sums averaged over heads; dropped entries are merged into kept ones (Liu et al. 2024).

    A dropped entry is merged into the kept entry with the nearest index (ties: the lower one), which becomes the mean.
    The published code ranks by the permutation of argsort in place of the scores. It merges the tokens that are `sinks`
    places before the dropped ones, and none into sinks or recent tokens.

    Attributes:
        merging: "position", or "none" to drop entries without merging.
        variant: "paper", or "released" for the published code. Other options are those of `FixedDistance`.
    """

    merging: Literal["position", "none"] = "position"
    facts = Facts(stages="score, rank, merge, step")

    @property
    def idle(self) -> tuple[str, ...]:
        return super().idle + those(rank=self.variant == "paper", merge=self.merging == "none")

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        """By score. The published code ranks by the permutation of argsort, and keeps one candidate fewer."""
        if self.variant == "paper":
            return scores, count
        number = ordinal(candidates)
        ascending = jnp.argsort(jnp.where(candidates, scores, jnp.inf), axis=1, stable=True)
        permutation = number[ascending][:, jnp.maximum(number, 0)].astype(jnp.float32)
        short = (count > 1) & (count < jnp.sum(candidates))
        return permutation, count - short

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        receives, gone = kept, merging.dropped(kept, scores)
        if self.variant == "released":
            inside = jnp.isfinite(scores[0])
            if self.scope == "all":
                receives = kept & ~(first(inside, self.sinks) | last(inside, self.recent))
                gone = jnp.roll(gone, -self.sinks, axis=1)
            gone = gone & inside & jnp.any(receives, axis=1, keepdims=True)
        target = merging.nearest_place(receives)
        return merging.fold(k, k, target, gone), merging.fold(v, v, target, gone)

    @override
    def decode_budget(self, state: DecodeState) -> Int[Array, " K"]:
        """The budget of prefill, of which the published code has kept one entry fewer (`rank`)."""
        if self.variant == "paper":
            return state.budget
        return jnp.minimum(state.budget + 1, state.vision + state.text)
