from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.fixed_distance import FixedDistance
from vlkv.compression.merging import dropped, fold, nearest_key, nearest_place
from vlkv.compression.option_types import Share
from vlkv.compression.policy import (
    Budgets,
    Entries,
    Facts,
    Kept,
    Observation,
    PerLayer,
    Scores,
    Statistics,
    Totals,
    those,
)
from vlkv.errors import InputError

_TOLERANCE = 5  # the published search stops within this number of tokens of the target
_HALVINGS = 24  # number of bisections of [0, 1] that float32 can represent


class PrefixKV(FixedDistance):
    """Column sums averaged over heads, and one threshold on their cumulative sum for all layers (Eq. 1, Alg. 1).

    Importance is normalised per layer and sorted. R_l is the length of the shortest prefix whose sum reaches p, with
    the sinks and recent tokens. Bisection on the bits of a float32 finds the p for which the R_l sum to the budget.

    The published code searches for the number of dropped tokens and stops within 5 tokens of the target, so it may keep
    up to L - 1 tokens more than the budget.

    Attributes:
        merging: dropped entries are merged into the kept entry that is nearest by "position" or by "cosine" of the keys
            (Table 12); "none": they are not merged.
        profile: share of tokens that each layer keeps, measured offline (`vlkv.profiles`), or one share for all layers.
            The budget is divided in this proportion, without a search. None: a search for every prompt.
        variant: "paper", or "released" for the published code. Other options are those of `FixedDistance`.
    """

    merging: Literal["none", "position", "cosine"] = "none"
    profile: tuple[Share, ...] | None = None
    facts = Facts(stages="score, allocate, merge, step", capped=True)

    @property
    def idle(self) -> tuple[str, ...]:
        return super().idle + those(merge=self.merging == "none")

    def check_model(self, layers: int) -> None:
        if self.profile is not None and len(self.profile) not in (1, layers):
            raise InputError(f"PrefixKV: profile has {len(self.profile)} layers, the model has {layers}")

    @property
    def slack(self) -> bool:
        """Whether all layers together may keep up to L - 1 tokens more than the budget."""
        return self.variant == "released" and self.profile is None

    def total(self, sums: Totals, *, layers: int, text: int) -> Totals:
        totals = budgets.total(self.keep, self.budget, sums, layers=layers)
        return np.minimum(totals + layers - 1, sums) if self.slack else totals

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        """`cumulative`: P_l(o) for o = 1..T, of importance in falling order; +inf beyond the tokens in scope."""
        importance = jnp.where(obs.in_scope, scores[0], 0.0)
        ordered = -jnp.sort(-importance / jnp.maximum(jnp.sum(importance), 1e-30))
        inside = jnp.arange(ordered.shape[0]) < jnp.sum(obs.in_scope)
        return {"cumulative": jnp.where(inside, jnp.cumsum(ordered), jnp.inf)}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        cumulative = statistics["cumulative"]
        protected = self.sinks + self.recent if self.scope == "all" else 0
        if self.slack:
            exact = total - (layers - 1)
            return released_budgets(cumulative, total=total, exact=exact, most=most, protected=protected)
        least = jnp.minimum(max(protected, 1), total // layers)
        if self.profile is not None:
            share = jnp.array(self.profile, jnp.float32) * most
            real = share * (total / jnp.maximum(jnp.sum(share), 1e-30))
            return budgets.apportion(real, total, floor=jnp.minimum(least, most), ceiling=most)
        place = jnp.arange(cumulative.shape[1])
        # A layer keeps its i-th token if p exceeds the sum before it, so its budget is the number of lower thresholds.
        before = jnp.pad(cumulative, [(0, 0), (1, 0)])[:, :-1]
        thresholds = jnp.where(place < least, 0.0, jnp.where(place < most[:, None], before, jnp.inf))
        return budgets.smallest(thresholds, total)

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        target = nearest_place(kept) if self.merging == "position" else nearest_key(k, kept)[0]
        gone = dropped(kept, scores)
        return fold(k, k, target, gone), fold(v, v, target, gone)


def forget_counts(
    cumulative: Float[Array, "L T"], target: Int[Array, ""], most: PerLayer, *, protected: int
) -> PerLayer:
    """The result of the published search: numbers of unprotected tokens to drop, whose sum is within 5 of `target`.

    If no threshold gives such a sum, the last of 24 is used; the published loop would not end.
    """

    def counts(p: Float[Array, ""]) -> PerLayer:
        return jnp.maximum(most - (jnp.sum(cumulative < p, axis=1) + 1) - protected, 0)

    def halve(_: Array, state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        low, high, p, done = state
        middle = (low + high) / 2
        forgotten = jnp.sum(counts(middle))
        few = forgotten < target
        return (
            jnp.where(done | few, low, middle),
            jnp.where(done | ~few, high, middle),
            jnp.where(done, p, middle),
            done | (jnp.abs(forgotten - target) < _TOLERANCE),
        )

    zero = jnp.float32(0)
    return counts(jax.lax.fori_loop(0, _HALVINGS, halve, (zero, jnp.float32(1), zero, jnp.array(False)))[2])


def scaled_forget_counts(forgotten: PerLayer, target: Int[Array, ""]) -> PerLayer:
    """The numbers of tokens to drop, scaled to the sum `target` and rounded down."""
    total = jnp.sum(forgotten)
    # Computed as a small difference, because the product of a count and the target would be rounded in float32.
    change = forgotten.astype(jnp.float32) * (target - total) / jnp.maximum(total, 1)
    return forgotten + jnp.floor(change).astype(forgotten.dtype)


def released_budgets(
    cumulative: Float[Array, "L T"], *, total: Int[Array, ""], exact: Int[Array, ""], most: PerLayer, protected: int
) -> PerLayer:
    """Budgets of the published code for `exact` tokens; at least one per layer, and not more than `total` together."""
    target = jnp.sum(most) - exact
    forgotten = scaled_forget_counts(forget_counts(cumulative, target, most, protected=protected), target)
    kept = jnp.clip(most - forgotten, jnp.minimum(max(protected, 1), most), most)
    # With a very small budget, the protected tokens alone can exceed the total.
    return budgets.apportion(
        kept.astype(jnp.float32), jnp.minimum(jnp.sum(kept), total), floor=jnp.minimum(1, most), ceiling=most
    )
