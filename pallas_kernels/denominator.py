"""The denominator of a softmax over part of the keys, to which a constant may be added.

Axes: B batch · N query heads · H head dim · M bound on a segment.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def add_constant(lse: Float[Array, "B N"], softmax_n: float) -> Float[Array, "B N"]:
    """log(softmax_n + exp(lse)), without overflow for large logits."""
    return jnp.logaddexp(lse, math.log(softmax_n)) if softmax_n else lse


def finish(
    out: Float[Array, "B N H"], lse: Float[Array, "B N"], mass: Float[Array, "B N M"] | None, softmax_n: float
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]] | tuple[Float[Array, "B N H"], Float[Array, "B N"], Array]:
    """Attention, log of the denominator, and mass if there is one, after `softmax_n` is added to the denominator."""
    attended = with_constant(out, lse, softmax_n)
    return attended if mass is None else (*attended, with_constant(mass, lse, softmax_n)[0])


def with_constant(
    x: Float[Array, "B N _"], lse: Float[Array, "B N"], softmax_n: float
) -> tuple[Float[Array, "B N _"], Float[Array, "B N"]]:
    """x, which was divided by a denominator, and its log, after `softmax_n` is added to the denominator."""
    if not softmax_n:
        return x, lse
    total = add_constant(lse, softmax_n)
    return x * jnp.exp(lse - total)[..., None], total


def normalized(
    total: Float[Array, "*n H"], peak: Float[Array, "*n"], weight: Float[Array, "*n"]
) -> tuple[Float[Array, "*n H"], Float[Array, "*n"]]:
    """Ends an online softmax: the attention, and the log of the denominator (-inf for an empty segment)."""
    filled = weight > 0
    weight = jnp.where(filled, weight, 1.0)
    return total / weight[..., None], jnp.where(filled, peak + jnp.log(weight), -jnp.inf)


def join(parts: Float[Array, "Z ..."], lse: Float[Array, "Z ..."], axis: int) -> tuple[Array, Array]:
    """Joins Z parts of a softmax, from the mean and the log-denominator of each; 0 if all parts are empty.

    `axis` is the axis of `parts` that `lse` does not have.
    """
    if len(lse) == 1:
        return parts[0], lse[0]
    total = jax.nn.logsumexp(lse, axis=0)
    share = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))
    return jnp.sum(parts * jnp.expand_dims(share, axis), axis=0), total
