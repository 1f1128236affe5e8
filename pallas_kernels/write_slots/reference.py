"""The specification of write_slots: every slot of x is compared with the slots of the new entries."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_slots_reference(
    x: Float[Array, "B #K P H"], new: Float[Array, "B K H"], slot: Int[Array, "B K"]
) -> Float[Array, "B #K P H"]:
    """Implements `write_slots` directly from its definition."""
    for head in range(new.shape[1]):
        column = head % x.shape[1]
        chosen = jnp.arange(x.shape[2]) == slot[:, head, None]  # [B, P]
        x = x.at[:, column].set(jnp.where(chosen[..., None], new[:, head, None], x[:, column]))
    return x
