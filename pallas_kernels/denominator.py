"""The denominator of a softmax over part of the keys: adding a constant, and the share of one part in the total.

Axes: B batch · N query heads.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_constant(lse: Float[Array, "B N"], softmax_n: float) -> Float[Array, "B N"]:
    """log(softmax_n + exp(lse)), without overflow for large logits."""
    return jnp.logaddexp(lse, math.log(softmax_n)) if softmax_n else lse


def share(lse: Float[Array, "B N"], total: Float[Array, "B N"]) -> Float[Array, "B N 1"]:
    """exp(lse - total): the share of one part in the joint denominator; 0 for an empty part."""
    return jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))[..., None]
