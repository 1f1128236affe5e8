"""The denominator of a softmax over part of the keys: how a constant joins it, and what share of a larger one it is.

Axes: B batch · N query heads.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_constant(lse: Float[Array, "B N"], softmax_n: float) -> Float[Array, "B N"]:
    """log(softmax_n + exp(lse)); large logits do not overflow, and a small n next to them is no matter."""
    return jnp.logaddexp(lse, math.log(softmax_n)) if softmax_n else lse


def share(lse: Float[Array, "B N"], total: Float[Array, "B N"]) -> Float[Array, "B N 1"]:
    """The share of a denominator that one part of it has; none of an empty one."""
    return jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))[..., None]
