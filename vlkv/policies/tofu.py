from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression import matching
from vlkv.compression.option_types import Count, Variant
from vlkv.compression.policy import Mask
from vlkv.policies.tome import ToMe


class ToFu(ToMe):
    """ToMe's matching; the first stages drop matched tokens, later ones merge them (Kim et al. 2024, Sec. 3).

    Early layers are less linear, so means suit them less. The mode "tofu" scales the mean of the merged vectors to the
    largest norm among them. The published code ("released") divides the mean by the norm of the receiving token, not by
    the norm of the mean.

    Attributes:
        mode: result of a merge: "tofu", the "mean", the elementwise maximum "amax", or "prune": the receiving token.
        pruning: number of first stages that prune in every mode.
        variant: "paper" or "released".
    """

    mode: Literal["tofu", "mean", "amax", "prune"] = "tofu"
    pruning: Count = 1
    variant: Variant = "paper"

    def combine(
        self, x: Float[Array, "T D"], size: Array, target: Array, merged: Mask, *, stage: int
    ) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
        if stage < self.pruning or self.mode == "prune":
            return x, size
        sizes = matching.sizes(size, target, merged)
        if self.mode == "amax":
            return matching.largest(x, target, merged), sizes
        mean = matching.fold(x, jnp.ones_like(size), target, merged)
        if self.mode == "mean":
            return mean, sizes
        norm, mean_norm = (jnp.linalg.norm(y.astype(jnp.float32), axis=-1, keepdims=True) for y in (x, mean))
        divisor = norm if self.variant == "released" else mean_norm
        stretch = matching.largest(norm, target, merged) / jnp.maximum(divisor, 1e-12)
        return jnp.where(matching.receives(target, merged)[:, None], mean * stretch, mean).astype(x.dtype), sizes
