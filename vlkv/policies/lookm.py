"""LOOK-M: text first, and what the image loses is merged into the keys most like it."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from vlkv import merging
from vlkv.observe import Observation, column_sums, first, group_mean, last
from vlkv.policies.policy import Policy, policy


@policy
class LookM(Policy):
    """Column sums with a text prior, and dropped entries merged into the most similar kept keys (Wan et al. 2024).

    Scores are per head as in H2O; with the prior the largest is added to every text token. Half of the budget is
    recent, half heavy (the paper: 10 % of the tokens each). Every dropped key goes to the kept key with the largest
    cosine, its value goes along; an entry becomes (entry + sum of contributions) / (1 + how many). A dropped entry e
    contributes to c: "average" e, "pivot" (e + c) / 2, "weighted" cosine x e.

    The published code keeps every text token even where that passes the budget, merges under "weighted" and "average"
    only what is more similar than the mean, and pairs the rows wrongly under "average"; its "pivot" is the paper's.

    Attributes:
        recent: tokens kept as recent; None: half of the mean budget of a layer.
        text_prior: whether text goes before vision.
        merging: "average", "weighted", "pivot", or "none".
        sinks: first tokens that always stay without the text prior, as in the published code.
    """

    recent: int | None = None
    text_prior: bool = True
    merging: Literal["average", "weighted", "pivot", "none"] = "pivot"
    sinks: int = 4
    paper = (
        "Wan et al. 2024, LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference"
    )
    stages = "score, merge"

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.recent is None or (isinstance(self.recent, int) and self.recent >= 0)
        self.check("recent", valid, "must be a whole number of at least 0, or None")
        ways = ("average", "weighted", "pivot", "none")
        self.check("merging", self.merging in ways, f"is none of {', '.join(ways)}")
        self.check("sinks", self.sinks >= 0, "must not be negative")

    def score(self, obs: Observation) -> Float[Array, "K T"]:
        """Column sums per key head, and for text the largest of them on top."""
        scores = group_mean(column_sums(obs), obs.k.shape[0])
        if not self.text_prior:
            return scores
        return scores + jnp.where(obs.is_vision, 0.0, jnp.max(scores, axis=-1, keepdims=True))

    def protect(self, obs: Observation) -> Bool[Array, " T"]:
        """The recent half, and the sinks where text has no prior."""
        recent = last(obs.valid, obs.mean_budget // 2 if self.recent is None else self.recent)
        return recent if self.text_prior else recent | first(obs.valid, self.sinks)

    def merge(
        self,
        k: Float[Array, "K T H"],
        v: Float[Array, "K T H"],
        kept: Bool[Array, "K T"],
        scores: Float[Array, "K T"],
    ) -> tuple[Float[Array, "K T H"], Float[Array, "K T H"]]:
        """Into the nearest kept key by cosine; values follow their keys."""
        if self.merging == "none":
            return k, v
        target, cosine = merging.nearest_key(k, kept)
        gone = merging.dropped(kept, scores)

        def contribution(x: Float[Array, "K T H"]) -> Float[Array, "K T H"]:
            if self.merging == "pivot":
                return (x + merging.at(x, target)) / 2
            return x * cosine[..., None] if self.merging == "weighted" else x

        return merging.fold(k, contribution(k), target, gone), merging.fold(v, contribution(v), target, gone)
