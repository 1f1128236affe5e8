"""The specification of write_slots: its arguments; every slot of x is compared with the slots of the new entries."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteArguments:
    """What every backend of `write_slots` takes; the op's docstring describes each argument."""

    x: Float[Array, "B #K P H"]
    new: Float[Array, "B K H"]
    slot: Int[Array, "B K"]


def write_slots_reference(args: WriteArguments) -> Float[Array, "B #K P H"]:
    """Implements `write_slots` directly from its definition."""
    x, new, slot = args.x, args.new, args.slot
    for head in range(new.shape[1]):
        column = head % x.shape[1]
        chosen = jnp.arange(x.shape[2]) == slot[:, head, None]  # [B, P]
        x = x.at[:, column].set(jnp.where(chosen[..., None], new[:, head, None], x[:, column]))
    return x
