"""write_slots in plain XLA: a scatter, which XLA performs in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_slots_xla(
    x: Float[Array, "B #K P H"], new: Float[Array, "B K H"], slot: Int[Array, "B K"]
) -> Float[Array, "B #K P H"]:
    """Implements `write_slots`."""
    where = jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1]), slot
    return x.at[where].set(new, mode="drop", wrap_negative_indices=False)
