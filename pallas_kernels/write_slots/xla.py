"""write_slots in plain XLA: a scatter, which XLA performs in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.write_slots.reference import WriteArguments


def write_slots_xla(args: WriteArguments) -> Float[Array, "B #K P H"]:
    """Implements `write_slots`."""
    where = jnp.arange(args.x.shape[0])[:, None], jnp.arange(args.x.shape[1]), args.slot
    return args.x.at[where].set(args.new, mode="drop", wrap_negative_indices=False)
