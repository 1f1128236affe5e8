from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets
from vlkv.compression.observe import Measure, Observation, group_mean, measured
from vlkv.compression.option_types import Share, Unit
from vlkv.compression.policy import Budgets, Facts, Mask, PerHead, PerLayer, Policy, Scores, Statistics, Totals
from vlkv.masks import last, ordinal


class VLCache(Policy):
    """Budgets by sparsity and scores by post-vision attention (Tu et al. 2024).

    The rows of the text after the image observe. Sparsity is the share of their causal entries that are less than
    `threshold` of the row's maximum. Budgets are proportional to 1 - sparsity, and between 0.01 and 1 of the tokens.
    The score is the column sum over these rows. With scope="all", max(1, 0.1 n) tokens of a budget n are the most
    recent ones.

    The authors published no code. Two re-implementations by others clip budgets without giving the difference to other
    layers, and add the window: "shared_window" gives every layer the last 0.1 keep T tokens and 0.9 of its budget;
    "per_layer_window" gives it its whole budget n and a window of 0.1 n.

    Attributes:
        threshold: share of a row's maximum from which an entry is counted.
        window: share of a layer's budget for its most recent tokens.
        variant: "paper", or a re-implementation, which needs keep= and scope="all". The pool is larger for them,
            because they may exceed the budget.
    """

    threshold: Share = 0.01
    window: Unit = 0.1
    variant: Literal["paper", "shared_window", "per_layer_window"] = "paper"
    facts = Facts(capped=True)
    idle = property(lambda self: ("rank",) if self.scope == "vision" else ())
    needs = property(lambda self: () if self.variant == "paper" else ("whole prompt",))

    def measures(self, obs: Observation) -> dict[str, Measure]:
        return dict((self.measure(obs), self.measure(obs, **self.counting)))

    @property
    def counting(self) -> dict[str, Any]:
        """Options of `measure` for the number of entries of a column that are not sparse."""
        return {"statistic": "count", "threshold": self.threshold}

    def __post_init__(self) -> None:
        super().__post_init__()
        supported = self.keep is not None and self.scope == "all" and self.cap is None
        self.check("variant", self.variant == "paper" or supported, 'needs keep=, scope="all" and no cap')

    def observers(self, obs: Observation) -> Mask:
        """The text after the image; if there is none, the last token."""
        return jnp.where(jnp.any(obs.instruction), last(obs.instruction, most_rows(obs)), last(obs.valid, 1))

    def score(self, obs: Observation) -> Scores:
        return group_mean(measured(obs, *self.measure(obs)), obs.k.shape[0])

    def measure(self, obs: Observation, **options: Any) -> tuple[str, Measure]:
        """A measure of the observers' attention and its name, which contains the options: they change the rows."""
        measure = Measure(self.observers(obs), most=most_rows(obs), **options)
        return f"{self} {measure.statistic}", measure

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        rows = self.observers(obs)
        counted = measured(obs, *self.measure(obs, **self.counting))
        entries = jnp.sum(jnp.where(rows, ordinal(obs.valid) + 1, 0))
        arrays = {"sparsity": 1 - jnp.sum(jnp.mean(counted, axis=0)) / jnp.maximum(entries, 1)}
        length = obs.valid.shape[0]
        if self.variant == "shared_window":
            arrays["window"] = jnp.asarray(self.shared_windows(np.arange(length + 1)))[jnp.sum(obs.in_scope)]
        if self.variant == "per_layer_window":
            arrays["windows"] = jnp.maximum(1, budgets.share(self.window, jnp.arange(length + 1), length))
        return arrays

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        """Budgets proportional to 1 - sparsity, at least a hundredth of the tokens unless the mean budget is smaller.

        The re-implementations have their own bounds, and add the window.
        """
        density = 1 - statistics["sparsity"]
        if self.variant != "paper":
            picked = jnp.maximum(1, jnp.floor(self.fractions(density) * most).astype(jnp.int32))
            if self.variant == "shared_window":
                return jnp.minimum(picked + statistics["window"], most)
            return jnp.minimum(picked + jax.vmap(jnp.take)(statistics["windows"], picked), most)
        floor = jnp.minimum(jnp.maximum(most // 100, 1), total // layers)
        real = density / jnp.maximum(jnp.sum(density), 1e-30) * total
        return budgets.apportion(real, total, floor=floor, ceiling=most)

    def rank(self, scores: Scores, statistics: Statistics, candidates: Mask, count: PerHead) -> tuple[Scores, PerHead]:
        if self.scope == "vision":
            return scores, count
        if self.variant == "shared_window":
            window = jnp.broadcast_to(statistics["window"], count.shape)
        elif self.variant == "per_layer_window":
            # The budget is n and the window of n: find n in the table of these sums.
            sizes = jnp.arange(len(statistics["windows"])) + statistics["windows"]
            window = count - jnp.searchsorted(sizes, count)
        else:
            window = jnp.maximum(1, budgets.share(self.window, count, scores.shape[1]))
        recent = jax.vmap(lambda n: last(candidates, n))(window)
        return jnp.where(recent, jnp.inf, scores), count

    def fractions(self, density: Float[Array, " L"]) -> Float[Array, " L"]:
        """Clipped shares of the tokens in the re-implementations; those of "shared_window" are without the window."""
        scale = 1 - self.window if self.variant == "shared_window" else 1.0
        share = density / jnp.maximum(jnp.sum(density), 1e-30) * scale * self.required_keep * density.shape[0]
        return jnp.clip(share, 0.01 * scale, 1.0)

    @property
    def required_keep(self) -> float:
        """`keep`, for type checkers: the re-implementations need it."""
        assert self.keep is not None
        return self.keep

    def shared_windows(self, counts: Int[np.ndarray, " counts"]) -> Int[np.ndarray, " counts"]:
        return np.maximum(1, counts * self.required_keep * self.window).astype(np.int32)

    def total(self, sums: Totals, *, layers: int, text: int) -> Totals:
        """The budget. For a re-implementation, a bound that is reached if all layers but one are clipped."""
        if self.variant == "paper":
            return budgets.total(self.keep, self.budget, sums, layers=layers)
        picked = (self.required_keep + 0.01 * (1 - self.required_keep)) * sums + layers
        if self.variant == "shared_window":
            kept = (1 - self.window) * picked + layers * self.shared_windows(sums // layers) + layers
        else:
            kept = (1 + self.window) * picked + layers
        return np.minimum(sums, np.ceil(kept)).astype(np.int32)


def most_rows(obs: Observation) -> int:
    """Bound on the observing rows."""
    return max(1, obs.max_instruction)
