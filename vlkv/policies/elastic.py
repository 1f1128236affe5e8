"""Elastic Cache: what is dropped is averaged into its nearest neighbour that stays."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Bool, Float

from vlkv import merging
from vlkv.observe import Observation, column_sums, first, head_mean, last
from vlkv.policies.policy import Policy, policy


@policy
class ElasticCache(Policy):
    """Head-mean column sums, and every dropped entry merged into the nearest kept one (Liu et al. 2024).

    A kept entry becomes the mean of itself and of the dropped ones that are nearer to it than to any other, by
    position, ties to the lower; keys and values alike, in every head. Any kept token may receive, text too.

    The published code compares argsort's permutation with a rank and so keeps another set than the best, one token
    fewer than asked; it forgets the sinks' offset among the dropped, so that other tokens are merged, and lets neither
    sinks nor the last token receive. This is the prefill half; deletion during decoding is not implemented yet.

    Attributes:
        sinks: first tokens that always stay.
        recent: last tokens that always stay.
        merging: "position", or "none" to drop without merging.
    """

    sinks: int = 1
    recent: int = 1
    merging: Literal["position", "none"] = "position"
    paper = "Liu et al. 2024, Efficient Inference of Vision Instruction-Following Models with Elastic Cache"
    stages = "score, merge"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("sinks", self.sinks >= 0, "must not be negative")
        self.check("recent", self.recent >= 0, "must not be negative")
        self.check("merging", self.merging in ("position", "none"), 'must be "position" or "none"')

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Head-mean column sums."""
        return head_mean(column_sums(obs), obs.k.shape[0])

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """Sinks and recent tokens."""
        return first(obs.valid, self.sinks) | last(obs.valid, self.recent)

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """The mean over each kept token and the dropped ones nearest to it."""
        if self.merging == "none":
            return k, v
        target, gone = merging.nearest_place(kept), merging.dropped(kept, scores)
        return merging.fold(k, k, target, gone), merging.fold(v, v, target, gone)
