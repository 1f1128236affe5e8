from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.observe import Observation, group_mean, head_mean, split_rows_mass
from vlkv.compression.option_types import Magnitude, Positive, Unit, Variant
from vlkv.compression.policy import Mask, PerHead, Policy, Scores, Statistics
from vlkv.masks import last, top


class CSP(Policy):
    """Cross-self pruning: keeps the union of two top-k lists and a recent window (Pei et al. 2024, Eqs. 1-4 and 7).

    The last rows observe. The self score of a key is the attention from rows of its own modality, the cross score that
    from rows of the other modality (Eq. 1), both with n-softmax (Eq. 7). Of the k tokens besides the recent ones, c k
    are the best by cross score and the others the best by self score (Eq. 2). The union is kept (Eq. 3), so fewer than
    k tokens if the lists overlap. If a list has fewer positive scores than its share, the other list gets the rest.

    Attributes:
        c: share of the cross list, or "auto": the share of cross attention in both, per layer and head. The paper
            calibrates one number on samples (Sec. 4.3), which `profiles.cross_share` measures.
        window: number of observing rows; None: half of a layer's mean budget (released: a tenth of the prompt).
        recent_bias: length of the recent window that is kept, in observation windows, rounded down (Sec. 4.3 uses 1.5
            on SlideVQA).
        score_n: n of Eq. 7 for scores; 0 is softmax.
        decode_n: n of Eq. 7 in decode attention, unless keep=1; None: 1 (released: 0).
        heads: "mean": scores are averaged over all heads; "each": per key head; None: "mean" (released: "each").
        regions: False: rank by the sum of both scores (ablation of Sec. 5.3).
        fill: True: a token that is in both lists counts once, and the next best of the cross list is kept too, so that
            exactly k tokens are kept.
        variant: "paper", or "released" for the published code.
    """

    c: Unit | Literal["auto"] = 0.5
    window: Positive | None = None
    recent_bias: Magnitude = 1.0
    score_n: Magnitude = 1.0
    decode_n: Magnitude | None = None
    heads: Literal["mean", "each"] | None = None
    regions: bool = True
    fill: bool = False
    variant: Variant = "paper"
    ranked_by = ("self", "cross")
    needs = property(lambda self: () if self.variant == "paper" else ("whole prompt",))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("fill", not (self.fill and self.variant == "released"), "does not exist in the published code")

    @property
    def softmax_n(self) -> float:
        """`decode_n`; 0 with keep=1, which is the full cache."""
        if self.keep == 1:
            return 0.0
        return float(self.variant == "paper") if self.decode_n is None else float(self.decode_n)

    def rows(self, obs: Observation) -> Int[Array, ""] | int:
        """Number of observing rows."""
        if self.window is not None:
            return self.window
        if self.variant == "released":
            return jnp.maximum(1, budgets.share(0.1, jnp.sum(obs.valid), obs.valid.shape[0]))
        return jnp.maximum(1, obs.mean_budget // 2)

    def most_rows(self, length: int) -> int:
        """Static bound on `rows`, for prompts of at most `length` tokens."""
        if self.window is not None:
            return self.window
        if self.variant == "released":
            return max(1, length // 10)
        return max(1, math.ceil(((self.keep or 0) * length + 1 if self.budget is None else self.budget) / 2))

    def regions_of(self, obs: Observation) -> tuple[Float[Array, "K T"], Float[Array, "K T"]]:
        """Attention that every key receives from rows of its own modality, and from rows of the other (Eq. 1)."""
        window = last(obs.valid, self.rows(obs))
        parts = jnp.stack([window & ~obs.is_vision, window & obs.is_vision])
        mass = split_rows_mass(obs, parts, self.most_rows(window.shape[0]), softmax_n=self.score_n)
        over_all_heads = self.variant == "paper" if self.heads is None else self.heads == "mean"
        reduce = head_mean if over_all_heads else group_mean
        text, vision = (reduce(x, obs.k.shape[0]) for x in mass)
        return jnp.where(obs.is_vision, vision, text), jnp.where(obs.is_vision, text, vision)

    def score(self, obs: Observation) -> Scores:
        within, cross = self.regions_of(obs)
        return within + cross

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        return dict(zip(("self", "cross"), self.regions_of(obs), strict=True))

    def protect(self, obs: Observation) -> Mask:
        rows, bias = self.rows(obs), float(self.recent_bias)
        if isinstance(rows, int):
            return last(obs.valid, math.floor(bias * rows))
        return last(obs.valid, budgets.share(bias, rows, obs.valid.shape[0]))

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        if not self.regions:
            return scores, count
        within, cross = (jnp.where(candidates, statistics[name], 0.0) for name in ("self", "cross"))
        if self.c == "auto":
            from_cross = jnp.floor(region_share(within, cross) * count).astype(jnp.int32)
        else:
            from_cross = budgets.share(float(self.c), count, scores.shape[1])
        if self.variant == "released":
            from_within = count - from_cross if self.c == "auto" else budgets.share(1 - self.c, count, scores.shape[1])
        else:
            # If a list has fewer positive scores than its share, the other list gets the rest.
            from_within = jnp.maximum(count - from_cross, count - jnp.sum(cross > 0, axis=1))
            from_within = jnp.minimum(from_within, jnp.sum(within > 0, axis=1))
            from_cross = count - from_within
        chosen = top(within, candidates, from_within)
        chosen = chosen | top(cross, candidates & ~chosen if self.fill else candidates, from_cross)
        # If the budget suffices for all candidates, overlapping lists must not drop any.
        chosen = jnp.where((count >= jnp.sum(candidates))[:, None], candidates, chosen)
        return jnp.where(chosen, jnp.inf, scores), jnp.sum(chosen, axis=1)


def region_share(within: Float[Array, "K T"], cross: Float[Array, "K T"]) -> Float[Array, " K"]:
    """The share of cross attention in the attention of both regions, per head."""
    return jnp.sum(cross, axis=1) / jnp.maximum(jnp.sum(within + cross, axis=1), 1e-30)
