"""The specifications of write_slots and swap_slots: their arguments, and the plainest implementations."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WriteArguments:
    """What every backend of `write_slots` takes; the op's docstring describes each argument."""

    x: Shaped[Array, "B #K P H"]
    new: Shaped[Array, "B K H"]
    slot: Int[Array, "B K"]


def write_slots_reference(args: WriteArguments) -> Shaped[Array, "B #K P H"]:
    """Implements `write_slots`: every slot of x is compared with the slots of the new entries."""
    x, new, slot = args.x, args.new, args.slot
    for head in range(new.shape[1]):
        column = head % x.shape[1]
        chosen = jnp.arange(x.shape[2]) == slot[:, head, None]  # [B, P]
        x = x.at[:, column].set(jnp.where(chosen[..., None], new[:, head, None], x[:, column]))
    return x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwapArguments:
    """What every backend of `swap_slots` takes; the op's docstring describes each argument."""

    pools: tuple[Shaped[Array, "B K P *H"] | Int[Array, "B K P *H"], ...]
    first: Int[Array, "B M"]
    second: Int[Array, "B M"]
    count: Int[Array, " B"]


def swap_slots_reference(args: SwapArguments) -> tuple[Array, ...]:
    """Implements `swap_slots`, one exchange after the other."""
    row = jnp.arange(args.first.shape[0])

    def exchange(i: Array, x: Array) -> Array:
        first, second = args.first[:, i], args.second[:, i]
        swapped = x.at[row, :, first].set(x[row, :, second]).at[row, :, second].set(x[row, :, first])
        return jnp.where((i < args.count).reshape(-1, *[1] * (x.ndim - 1)), swapped, x)

    return tuple(jax.lax.fori_loop(0, args.first.shape[1], exchange, x) for x in args.pools)
