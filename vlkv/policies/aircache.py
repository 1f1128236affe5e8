from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.merging import dropped, fold, nearest_place
from vlkv.compression.observe import Measure, Observation, group_mean, head_mean, measured, rows_mass
from vlkv.compression.option_types import Positive, Scope, Unit
from vlkv.compression.policy import Budgets, Entries, Facts, Kept, Mask, PerLayer, Policy, Scores, Statistics, those
from vlkv.masks import last, top
from vlkv.policies.pyramidkv import pyramid


class AirCache(Policy):
    """Elite observation window and budgets by strength and skewness (Huang et al. 2025, Eqs. 4-11).

    The elite are the instruction tokens that receive at least alpha times the largest attention from the last one. The
    importance of a vision token is the mean, over elite rows and all heads, of a softmax over vision keys and elite
    keys (Eqs. 6-8); with scope="all" (starred rows of Table 6) over every key. Budgets follow its sum over the tokens
    (Eq. 9) and its skewness (Eq. 10).

    Attributes:
        alpha: relevance threshold of Eq. 5; 0 selects the whole instruction, 1 only the strongest token.
        window: rows that observe (Table 5): "elite"; "recent": the last `rows` instruction tokens; "text": the whole
            instruction; "vision": the last `rows` vision tokens.
        rows: length of the windows "recent" and "vision" (the paper tries 16 and 32).
        allocation: budgets (Table 5) by "both" strength and skewness, "strength", "skewness", "uniform", "pyramid".
        heads: "mean": importance is averaged over all heads, as we understand Eq. 8; "each": per key head.
        merging: share of the dropped entries, the most important first, that is merged into the nearest kept one (Table
            11); 0, the paper's default, drops all of them.
    """

    scope: Scope = "vision"
    alpha: Unit = 0.9
    window: Literal["elite", "recent", "text", "vision"] = "elite"
    rows: Positive = 32
    allocation: Literal["both", "strength", "skewness", "uniform", "pyramid"] = "both"
    heads: Literal["mean", "each"] = "mean"
    merging: Unit = 0.0
    facts = Facts(capped=True)

    idle = property(lambda self: those(allocate=self.allocation == "uniform", merge=self.merging == 0))

    def measures(self, obs: Observation) -> dict[str, Measure]:
        return dict([self.measure(obs)] if self.scope == "all" else [])

    def observers(self, obs: Observation) -> Mask:
        """The tokens whose attention scores the image; none without text after it, except with window="vision"."""
        if self.window == "vision":
            return last(obs.valid & obs.is_vision, self.rows)
        if self.window == "recent":
            return last(obs.instruction, self.rows)
        if self.window == "text":
            return obs.instruction
        attention = rows_mass(obs, last(obs.valid, 1), 1, keys=obs.instruction)  # last row of A_tt (Eq. 4)
        attention = jnp.where(obs.instruction, jnp.mean(attention, axis=0), -1.0)
        return obs.instruction & (attention >= self.alpha * jnp.max(attention))

    def score(self, obs: Observation) -> Scores:
        observers = self.observers(obs)
        if self.scope == "all":
            mass = measured(obs, *self.measure(obs), among=self.among(obs))
        else:
            keys = obs.valid & (obs.is_vision | observers)
            mass = rows_mass(obs, observers, self.most_rows(obs), keys=keys, among=self.among(obs))
        mass = mass / jnp.maximum(jnp.sum(observers), 1)
        return (head_mean if self.heads == "mean" else group_mean)(mass, obs.k.shape[0])

    def measure(self, obs: Observation) -> tuple[str, Measure]:
        return f"{self}", Measure(self.observers(obs), most=self.most_rows(obs))

    def most_rows(self, obs: Observation) -> int:
        return self.rows if self.window in ("recent", "vision") else obs.max_instruction

    def among(self, obs: Observation) -> Mask | None:
        """Rows that include the observers and are the same in all layers, or None."""
        return None if self.window in ("recent", "vision") else obs.instruction

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        importance, inside = jnp.mean(scores, axis=0), obs.in_scope
        count = jnp.sum(inside)
        strength = jnp.sum(jnp.where(inside, importance, 0.0))
        return {
            "observers": self.observers(obs),
            "count": count,
            "asked": obs.asked,
            "strength": strength,
            "skewness": skewness(importance, inside, count),
        }

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        """Eq. 11, made integers with the sum `total` by `budgets.apportion`, at most the tokens of each layer."""
        if self.allocation == "uniform":
            return budgets.uniform(total, most)
        # With `keep`, the mean is not total / layers, because rounding `total` would change the remainders of Eq. 11.
        mean = total / layers if self.keep is None else jnp.mean(statistics["asked"])
        strength = by_mean(statistics["strength"])
        skew = by_mean(jnp.maximum(statistics["skewness"], 0.0))
        if self.allocation == "pyramid":
            real = pyramid(mean, layers, beta=20)
        else:
            share = {"both": (strength + skew) / 2, "strength": strength, "skewness": skew}[self.allocation]
            real = share * mean
        return budgets.apportion(real, total, floor=jnp.minimum(1, most), ceiling=most)

    def merge(self, k: Entries, v: Entries, kept: Kept, scores: Scores) -> tuple[Entries, Entries]:
        gone = dropped(kept, scores)
        gone = top(scores, gone, budgets.share(self.merging, jnp.sum(gone, axis=1), gone.shape[1]))
        target = nearest_place(kept & jnp.isfinite(scores))
        return fold(k, k, target, gone), fold(v, v, target, gone)


def skewness(x: Float[Array, " T"], inside: Mask, count: Int[Array, ""]) -> Float[Array, ""]:
    """n / ((n-1)(n-2)) sum ((x - mean) / s)^3 with the sample deviation s; 0 for n < 3 or s = 0 (Eq. 10)."""
    n = jnp.maximum(count, 3).astype(jnp.float32)
    mean = jnp.sum(jnp.where(inside, x, 0.0)) / n
    centred = jnp.where(inside, x - mean, 0.0)
    largest = jnp.max(jnp.abs(centred))
    defined = (count >= 3) & (largest > 1e-6 * jnp.abs(mean))  # smaller deviations are rounding errors
    # Divided by the largest deviation, because cubes of attention weights underflow in float32.
    centred = centred / jnp.where(defined, largest, 1.0)
    deviation = jnp.sqrt(jnp.sum(centred**2) / (n - 1))
    cubes = jnp.sum((centred / jnp.where(defined, deviation, 1.0)) ** 3)
    return jnp.where(defined, n / ((n - 1) * (n - 2)) * cubes, 0.0)


def by_mean(x: Float[Array, " L"]) -> Float[Array, " L"]:
    """x divided by its mean over layers; all ones if all are zero."""
    mean = jnp.mean(x)
    return jnp.where(mean > 0, x / jnp.where(mean > 0, mean, 1.0), 1.0)
