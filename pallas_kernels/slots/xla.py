"""write_slots and swap_slots in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pallas_kernels.slots.reference import SwapArguments, WriteArguments


def write_slots_xla(args: WriteArguments) -> Shaped[Array, "B #K P H"]:
    """Implements `write_slots`: a scatter, which XLA performs in place."""
    where = jnp.arange(args.x.shape[0])[:, None], jnp.arange(args.x.shape[1]), args.slot
    return args.x.at[where].set(args.new, mode="drop", wrap_negative_indices=False)


def swap_slots_xla(args: SwapArguments) -> tuple[Array, ...]:
    """Implements `swap_slots`: a gather and a scatter of all pairs, in a loop of at most one iteration: in place."""
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
