from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv.compression.observe import Observation, group_mean, pool, rows_mass
from vlkv.compression.option_types import Odd, Pooling, Positive
from vlkv.compression.policy import Mask, Policy, Scores
from vlkv.masks import last


class SnapKV(Policy):
    """Scores are the attention of the last `window` queries, summed and smoothed along the tokens. The window is kept.

    The last queries predict what the answer attends to (Li et al. 2024, Sec. 4, Eqs. 1-5). Query heads that share a key
    head are averaged before smoothing.

    Attributes:
        window: number of observing rows at the end of the prompt. With scope="all", a window that is as large as a
            layer's mean budget shrinks to half of it, because otherwise only recent tokens would be kept.
        kernel: width of the smoothing, odd.
        pooling: "avg" or "max".
        observers: which queries observe. "last": those of the last tokens of the prompt; "text": those of the last text
            tokens after the image, of which there may be fewer than `window` (the baseline in AirCache's paper).
    """

    window: Positive = 32
    kernel: Odd = 5
    pooling: Pooling = "avg"
    observers: Literal["last", "text"] = "last"

    newest = property(lambda self: self.window)

    def score(self, obs: Observation) -> Scores:
        """Smoothed attention of the window. For smoothing, tokens that are always kept count as zero."""
        mass = group_mean(rows_mass(obs, self.protect(obs), self.window), obs.k.shape[0])
        return pool(jnp.where(self.candidates(obs), mass, 0.0), self.kernel, self.pooling)

    def candidates(self, obs: Observation) -> Mask:
        """Tokens in scope that are not kept in any case."""
        return obs.in_scope & ~(self.protect(obs) | obs.first) if self.scope == "all" else obs.in_scope

    def protect(self, obs: Observation) -> Mask:
        among = obs.valid if self.observers == "last" else obs.instruction
        return last(among, self.rows(obs.mean_budget))

    def rows(self, mean: Int[Array, ""]) -> Int[Array, ""] | int:
        """Length of the observation window if `mean` is a layer's mean budget."""
        if self.scope == "vision":
            return self.window
        return jnp.where(self.window < mean, self.window, jnp.maximum(1, mean >> 1))  # `//` compiles to ten operations
