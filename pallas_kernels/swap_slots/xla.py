"""swap_slots in plain XLA: a gather and a scatter of all pairs, in a loop of one or no iteration, so it is in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.swap_slots.reference import SwapArguments


def swap_slots_xla(args: SwapArguments) -> tuple[Array, ...]:
    """Implements `swap_slots`."""
    (batch, pairs), slots = args.first.shape, args.pools[0].shape[2]
    taken = jnp.arange(pairs) < args.count[:, None]
    source, target = (
        jnp.concatenate([jnp.where(taken, x, slots) for x in lists], axis=1)
        for lists in ((args.second, args.first), (args.first, args.second))
    )
    row = jnp.arange(batch)[:, None]

    def exchange(_: Array, pools: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(x.at[row, :, target].set(x.at[row, :, source].get(mode="clip"), mode="drop") for x in pools)

    return jax.lax.fori_loop(0, jnp.any(args.count > 0).astype(jnp.int32), exchange, args.pools)
