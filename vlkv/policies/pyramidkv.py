"""PyramidKV: many entries in low layers, few in high ones, on a straight line."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv import budgets
from vlkv.policies.policy import Statistics, policy
from vlkv.policies.snapkv import SnapKV


@policy
class PyramidKV(SnapKV):
    """SnapKV's scores with linearly falling budgets (Cai et al. 2024, Eqs. 3-5).

    With C the mean budget and w the window (0 under scope="vision"): from 2(C - w) - (C - w)/beta in the lowest layer
    to (C - w)/beta in the highest, plus w each; clipped to what there is, the total exact.

    Attributes:
        beta: how small the top of the pyramid is.
    """

    window: int = 8
    kernel: int = 7
    pooling: Literal["avg", "max"] = "max"
    beta: int = 20
    paper = "Cai et al. 2024, PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
    equations = "Sec. 4.2, Eqs. 3-5"
    stages = "score, allocate"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("beta", self.beta >= 1, "must be at least 1")

    def allocate(
        self, statistics: Statistics, *, total: Int[Array, ""], most: Int[Array, " L"], layers: int
    ) -> Int[Array, " L"]:
        """The line, made of integers."""
        del statistics
        window = jnp.minimum(self.window, total // layers) if self.scope == "all" else jnp.int32(0)
        line = pyramid(total / layers - window, layers, self.beta) + window
        return budgets.apportion(line, total, floor=jnp.minimum(1, most), ceiling=most)


def pyramid(mean: Array, layers: int, beta: int) -> Array:
    """The real-valued line of L budgets around a mean."""
    if layers == 1:
        return jnp.asarray(mean, jnp.float32)[None]
    lowest = 2 * mean - mean / beta
    return lowest + (mean / beta - lowest) * jnp.arange(layers) / (layers - 1)
