from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression import budgets, merging
from vlkv.compression.observe import Observation, column_sums, columns, group_mean, prefer_text
from vlkv.compression.option_types import Count, Variant
from vlkv.compression.policy import Budgets, Entries, Kept, Mask, PerLayer, Policy, Scores, Statistics, Totals, those
from vlkv.masks import first, last


class LookM(Policy):
    """Column sums with a text prior. Dropped entries are merged into the kept ones with similar keys (Wan et al. 2024).

    The text prior adds the largest score to every text token. Half of the budget is for recent tokens. Every dropped
    key and its value are merged into the kept entry whose key has the largest cosine: an entry c becomes (c + sum of
    contributions) / (1 + their number). The contribution of a dropped entry e is e ("average"), (e + c) / 2 ("pivot")
    or cosine x e ("weighted").

    The published code keeps all text, even if it exceeds the budget. With "weighted" and "average" it merges only
    entries of at least mean similarity, and "average" merges them into wrong targets.

    Attributes:
        recent: number of recent tokens that are kept; None: half of a layer's mean budget.
        text_prior: whether text is preferred.
        merging: "average", "weighted", "pivot", or "none".
        sinks: number of first tokens that are always kept without the text prior, as in the published code.
        variant: "paper", or "released" for the published code; its pool has capacity for all text.
    """

    recent: Count | None = None
    text_prior: bool = True
    merging: Literal["average", "weighted", "pivot", "none"] = "pivot"
    sinks: Count = 4
    variant: Variant = "paper"
    measures = columns("sum")
    one_scale = False
    needs = property(lambda self: () if self.variant == "paper" else ("whole prompt",))
    idle = property(lambda self: those(allocate=not self.overshoots, merge=self.merging == "none"))

    @property
    def overshoots(self) -> bool:
        """Whether text may exceed the budget."""
        return self.variant == "released" and self.text_prior and self.scope == "all"

    def score(self, obs: Observation) -> Scores:
        scores = group_mean(column_sums(obs), obs.k.shape[0])
        if not self.text_prior:
            return scores
        return prefer_text(obs, scores)

    def protect(self, obs: Observation) -> Mask:
        recent = last(obs.valid, obs.mean_budget // 2 if self.recent is None else self.recent)
        return recent if self.text_prior else recent | first(obs.valid, self.sinks)

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        if not self.overshoots:
            return {}
        return {"granted": jnp.maximum(obs.mean_budget, jnp.sum(obs.in_scope & (~obs.is_vision | self.protect(obs))))}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        if self.overshoots:
            return jnp.minimum(statistics["granted"], most)
        return budgets.uniform(total, most)

    def total(self, sums: Totals, *, layers: int, text: int) -> Totals:
        totals = budgets.total(self.keep, self.budget, sums, layers=layers)
        if not self.overshoots:
            return totals
        mean = totals // layers
        recent = mean // 2 if self.recent is None else self.recent
        return np.minimum(sums, layers * np.maximum(mean, text + recent))

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        target, cosine = merging.nearest_key(k, kept)
        gone = merging.dropped(kept, scores)
        if self.variant == "released" and self.merging != "pivot":
            target, gone = released_pairs(target, cosine, gone, misaligned=self.merging == "average")

        def contribution(x: Float[Array, "K T H"]) -> Float[Array, "K T H"]:
            if self.merging == "pivot":
                return (x + merging.at(x, target)) / 2
            return x * cosine[..., None] if self.merging == "weighted" else x

        return merging.fold(k, contribution(k), target, gone), merging.fold(v, contribution(v), target, gone)


def released_pairs(
    target: Int[Array, "K T"], cosine: Float[Array, "K T"], gone: Bool[Array, "K T"], *, misaligned: bool
) -> tuple[Int[Array, "K T"], Bool[Array, "K T"]]:
    """Targets and merged tokens of the published code.

    Args:
        target: the most similar kept token of each token.
        cosine: its similarity.
        gone: dropped tokens. If heads drop different numbers of them, the mean over heads is that of the heads that
            have an i-th one.
        misaligned: the first n dropped tokens are merged into the targets of the n tokens that pass the filter, instead
            of those n tokens themselves.
    """
    head, slot = jnp.arange(target.shape[0])[:, None], jnp.arange(target.shape[1])
    token = jnp.argsort(~gone, axis=1, stable=True)  # the i-th dropped token of every head
    exists = slot < jnp.sum(gone, axis=1)[:, None]
    heads, count = jnp.sum(exists, axis=0), jnp.max(jnp.sum(gone, axis=1))
    near = jnp.sum(jnp.where(exists, cosine[head, token], 0.0), axis=0) / jnp.maximum(heads, 1)
    passes = exists & (near >= jnp.sum(near) / jnp.maximum(count, 1))
    if misaligned:
        source = jnp.argsort(~passes, axis=1, stable=True)
        target = target.at[head, token].set(target[head, token[head, source]])
        passes = slot < jnp.sum(passes, axis=1, keepdims=True)
    return target, jnp.zeros_like(gone).at[head, token].set(passes)
