"""The specification of swap_slots: its arguments, and one exchange after the other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwapArguments:
    """What every backend of `swap_slots` takes; the op's docstring describes each argument."""

    pools: tuple[Float[Array, "B K P *H"] | Int[Array, "B K P *H"], ...]
    first: Int[Array, "B M"]
    second: Int[Array, "B M"]
    count: Int[Array, " B"]


def swap_slots_reference(args: SwapArguments) -> tuple[Array, ...]:
    """Implements `swap_slots` directly from its definition."""
    row = jnp.arange(args.first.shape[0])

    def exchange(i: Array, x: Array) -> Array:
        first, second = args.first[:, i], args.second[:, i]
        made = x.at[row, :, first].set(x[row, :, second]).at[row, :, second].set(x[row, :, first])
        return jnp.where((i < args.count).reshape(-1, *[1] * (x.ndim - 1)), made, x)

    return tuple(jax.lax.fori_loop(0, args.first.shape[1], exchange, x) for x in args.pools)
