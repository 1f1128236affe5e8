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


def finish(
    out: Float[Array, "B N H"], lse: Float[Array, "B N"], mass: Float[Array, "B N M"] | None, softmax_n: float
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]] | tuple[Float[Array, "B N H"], Float[Array, "B N"], Array]:
    """Attention, log of the denominator, and mass if there is one, after `softmax_n` is added to the denominator."""
    total = add_constant(lse, softmax_n)
    part = share(lse, total)
    return (out * part, total) if mass is None else (out * part, total, mass * part)


def share(lse: Float[Array, "B N"], total: Float[Array, "B N"]) -> Float[Array, "B N 1"]:
    """exp(lse - total): the share of one part in the joint denominator; 0 for an empty part."""
    return jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))[..., None]
