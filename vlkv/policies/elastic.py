"""Elastic Cache: what is dropped is averaged into its nearest neighbour that stays."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv import merging
from vlkv.memory import Memory
from vlkv.observe import Observation, column_sums, first, head_mean, last, ordinal
from vlkv.policies.fixed_distance import evict_at_distance, share_bounds, share_of_seen
from vlkv.policies.policy import Policy, Statistics, policy


@policy
class ElasticCache(Policy):
    """Head-mean column sums, and every dropped entry merged into the nearest kept one (Liu et al. 2024).

    A kept entry becomes the mean of itself and of the dropped ones that are nearer to it than to any other, by
    position, ties to the lower; keys and values alike, in every head. Any kept token may receive, text too.

    While decoding a layer's share of all tokens seen stays that of the prompt, and what leaves is the entry at a fixed
    distance from the newest; where there are no more entries than that, the middle one. Under scope="vision" new
    tokens are text, so nothing leaves.

    The published code takes argsort's permutation for ranks and so keeps another set than the best, one token fewer
    than asked; it forgets the sinks' offset among the dropped, so that other tokens are merged, and lets neither sinks
    nor recent tokens receive; while decoding it deletes at the rank, by age, that lies `distance` before the end of
    the prompt's entries. All of this is variant="released".

    Attributes:
        sinks: first tokens that always stay.
        recent: last tokens that always stay.
        merging: "position", or "none" to drop without merging.
        distance: the entry that leaves while decoding is the `distance`-th newest; None: nothing leaves.
        variant: "paper", or "released" as the published code.
    """

    sinks: int = 1
    recent: int = 1
    merging: Literal["position", "none"] = "position"
    distance: int | None = 25
    variant: Literal["paper", "released"] = "paper"
    paper = "Liu et al. 2024, Efficient Inference of Vision Instruction-Following Models with Elastic Cache"
    stages = "score, rank, merge, step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("sinks", self.sinks >= 0, "must not be negative")
        self.check("recent", self.recent >= 0, "must not be negative")
        self.check("merging", self.merging in ("position", "none"), 'must be "position" or "none"')
        whole = self.distance is None or (isinstance(self.distance, int) and self.distance >= 1)
        self.check("distance", whole, "must be a whole number of at least 1, or None")
        self.check("variant", self.variant in ("paper", "released"), 'must be "paper" or "released"')

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Head-mean column sums."""
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
        """By score; released: by which candidate has the score of one's own number, and one fewer."""
        del statistics
        if self.variant == "paper":
            return scores, count
        number = ordinal(candidates)
        ascending = jnp.argsort(jnp.where(candidates, scores, jnp.inf), axis=1, stable=True)
        permutation = number[ascending][:, jnp.maximum(number, 0)].astype(jnp.float32)
        short = (count > 1) & (count < jnp.sum(candidates))
        return permutation, count - short

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
    def acts(self) -> bool:
        """While tokens of all kinds count."""
        return self.distance is not None and self.scope == "all"

    @property
    def evicts(self) -> bool:
        """If it acts."""
        return self.acts

    def decode_slots(self, memory: Memory) -> Int[Array, " K"]:
        """Its share of all tokens that may be seen, and one that arrives."""
        return share_of_seen(self.asked(memory), memory, memory.new_tokens) + 1

    def decode_bounds(
        self, kept: int, longest: int, *, layers: int, vision: int, text: int, new_tokens: int
    ) -> tuple[int, int]:
        """As `decode_slots`."""
        return share_bounds(self, kept, longest, layers=layers, most=vision + text, new_tokens=new_tokens)

    def step(self, memory: Memory, mass: Float[Array, "N E"]) -> Memory:
        """Lets one entry go if the layer holds more than its share of what has been seen."""
        del mass
        assert self.distance is not None
        moving = self.variant == "paper"
        return evict_at_distance(memory, self.distance, capacity=self.asked(memory), moving=moving)

    def asked(self, memory: Memory) -> Int[Array, " K"]:
        """What prefill asked for; the published code has kept one fewer."""
        if self.variant == "paper":
            return memory.capacity
        return jnp.minimum(memory.capacity + 1, memory.vision + memory.text)
