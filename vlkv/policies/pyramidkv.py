from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from vlkv.compression import budgets
from vlkv.compression.option_types import Odd, Pooling, Positive, Variant
from vlkv.compression.policy import Budgets, Facts, Observation, PerLayer, Scores, Statistics, Totals
from vlkv.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV's scores, with budgets that fall linearly from layer to layer (Cai et al. 2024, Eqs. 3-5).

    With mean budget C and window w (0 with scope="vision"), budgets fall from 2(C - w) - (C - w)/beta in the lowest
    layer to (C - w)/beta in the highest, plus w in each. The published code rounds down both ends and the step, so its
    total exceeds L C, and gives short prompts equal budgets.

    Attributes:
        beta: the highest layer's budget is (C - w) / beta, plus w.
        variant: "paper", or "released" for the rounding of the published code, which needs a larger pool.
    """

    window: Positive = 8
    kernel: Odd = 7
    pooling: Pooling = "max"
    beta: Positive = 20
    variant: Variant = "paper"
    facts = Facts(capped=True)
    needs = property(lambda self: () if self.variant == "paper" else ("whole prompt",))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("cap", self.cap is None or self.variant == "paper", "is not supported for the released variant")

    def statistics(self, obs: Observation, scores: Scores) -> Statistics:
        if self.variant == "paper":
            return {}
        return {"mean": obs.mean_budget, "count": jnp.sum(obs.in_scope)}

    def allocate(self, statistics: Statistics, *, total: Int[Array, ""], most: PerLayer, layers: int) -> Budgets:
        if self.variant == "released":
            return self.released_line(statistics["mean"][0], statistics["count"][0], layers=layers)
        window = self.rows(total // layers) if self.scope == "all" else 0
        line = pyramid(total / layers - window, layers, self.beta) + window
        return budgets.apportion(line, total, floor=jnp.minimum(1, most), ceiling=most)

    def released_line(self, mean: Int[Array, ""], count: Int[Array, ""], *, layers: int) -> Int[Array, " L"]:
        """Budgets of the published code. `mean` is C, `count` the number of tokens in scope."""
        window = self.rows(mean) if self.scope == "all" else 0
        spare = mean - window
        highest = spare // self.beta
        lowest = jnp.minimum(2 * spare - highest, count - window)
        step = (2 * lowest - 2 * spare) // max(layers - 1, 1)  # the two ends always sum to 2(C - w)
        line = lowest - step * jnp.arange(layers) + window
        return jnp.where(count < mean, count, jnp.where(count < 2 * spare, mean, line))

    def total(self, sums: Totals, *, layers: int, text: int) -> Totals:
        totals = budgets.total(self.keep, self.budget, sums, layers=layers)
        if self.variant == "paper":
            return totals
        with jax.ensure_compile_time_eval():
            line = jax.vmap(lambda mean, count: self.released_line(mean, count, layers=layers))
            return np.asarray(jnp.sum(line(jnp.asarray(totals // layers), jnp.asarray(sums // layers)), axis=1))


def pyramid(mean: Array, layers: int, beta: int) -> Array:
    """L real-valued budgets that fall linearly and have the given mean."""
    if layers == 1:
        return jnp.asarray(mean, jnp.float32)[None]
    lowest = 2 * mean - mean / beta
    return lowest + (mean / beta - lowest) * jnp.arange(layers) / (layers - 1)
