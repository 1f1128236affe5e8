"""swap_slots for TPU: copies each pair of slots to VMEM, exchanges it there, and writes it back.

XLA packs two bfloat16 slots into the words of one row, so a copy moves a unit of two slots of all heads (float32: one).
Several pairs are exchanged at a time. They must not share a unit, or one would overwrite the other; lists are
ascending, so every second pair of a list has a unit of its own.

Axes: B batch · K key heads · P slots · H head dim · M bound on the pairs of a row · W pairs exchanged at a time ·
U slots of a unit · A pools.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.swap_slots.reference import SwapArguments
from pallas_kernels.tpu import interpreter, last_axis_is_slots

_WAVE, _TILE = 8, 16  # W; slots


@partial(jax.jit, static_argnames="interpret")
def swap_slots_mosaic_tpu(args: SwapArguments, interpret: bool = False) -> tuple[Array, ...]:
    """Implements `swap_slots` for TPU."""
    (batch, kv_heads, _, head_dim), dtype = args.pools[0].shape, args.pools[0].dtype
    lists = [x[:, None].astype(jnp.int32) for x in (args.first, args.second)]
    listed = pl.BlockSpec((1, 1, lists[0].shape[2]), lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM)
    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(args.pools)
    units = (_WAVE, 2, len(args.pools), kv_heads, 4 // dtype.itemsize, head_dim)
    swapped = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch,),
            in_specs=[listed, listed, *in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.VMEM(units, dtype), pltpu.SemaphoreType.DMA((_WAVE,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args.pools],
        input_output_aliases={3 + i: i for i in range(len(args.pools))},
        interpret=interpreter(interpret),
        name="swap_slots",
    )(args.count.astype(jnp.int32), *lists, *args.pools)
    return tuple(swapped)


# lists: twice [1, 1, M]; refs: A pools [B, K, P, H], the same as outputs, units [W, 2, A, K, U, H], semaphores [W]
def _kernel(count_ref: Any, first_ref: Any, second_ref: Any, *refs: Any) -> None:
    *refs, units, semaphores = refs
    lists, pools, row = (first_ref, second_ref), refs[len(refs) // 2 :], pl.program_id(0)
    kv_heads, unit, head_dim = units.shape[3:]

    def copies(j: Any, i: Any, act: Callable[[Any, Any, Any], None]) -> None:
        """Calls act(unit in the pool, unit in VMEM, semaphore) for both slots of pair i in every pool."""
        for side, slots in enumerate(lists):
            begin = pl.multiple_of(slots[0, 0, i] // unit * unit, unit)
            for which, pool in enumerate(pools):
                act(pool.at[row, :, pl.ds(begin, unit)], units.at[j, side, which], semaphores.at[j])

    def start(j: Any, i: Any) -> None:
        copies(j, i, lambda pool, unit, semaphore: pltpu.make_async_copy(pool, unit, semaphore).start())

    def exchange(j: Any, i: Any) -> None:
        copies(j, i, lambda pool, unit, semaphore: pltpu.make_async_copy(pool, unit, semaphore).wait())
        at = [jax.lax.rem(slots[0, 0, i], unit) for slots in lists]
        place = jax.lax.broadcasted_iota(jnp.int32, (kv_heads, unit, head_dim), 1)
        for which in range(len(pools)):
            old = [units[j, side, which].astype(jnp.float32) for side in range(2)]
            slot = [jnp.where(at[s] == 0, old[s][:, :1], old[s][:, unit - 1 :]) for s in range(2)]  # [K, 1, H]
            for side in range(2):
                new = jnp.where(place == at[side], slot[1 - side], old[side])
                units[j, side, which] = new.astype(units.dtype)
        copies(j, i, lambda pool, unit, semaphore: pltpu.make_async_copy(unit, pool, semaphore).start())

    def finish(j: Any, i: Any) -> None:
        copies(j, i, lambda pool, unit, semaphore: pltpu.make_async_copy(unit, pool, semaphore).wait())

    def wave(w: Any, _: None) -> None:
        begin = w // unit * unit * _WAVE + jax.lax.rem(w, unit)

        def of_pairs(act: Callable[[Any, Any], None]) -> None:
            def of_pair(j: Any, _: None) -> None:
                i = begin + j * unit
                pl.when(i < count_ref[row])(lambda: act(j, i))

            jax.lax.fori_loop(0, _WAVE, of_pair, None)

        for act in (start, exchange, finish):
            of_pairs(act)

    jax.lax.fori_loop(0, pl.cdiv(count_ref[row], unit * _WAVE) * unit, wave, None)


def unsupported(args: SwapArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    kinds = {(x.shape, x.dtype) for x in args.pools}
    if len(kinds) > 1 or args.pools[0].ndim != 4 or args.pools[0].dtype not in (jnp.bfloat16, jnp.float32):
        return f"the pools are {kinds}, not [B, K, P, H] of one shape, all bfloat16 or all float32"
    slots, head_dim = args.pools[0].shape[2:]
    if last_axis_is_slots(slots, head_dim):
        return f"a head dim of {head_dim} with {slots} slots is stored with the slots in the lanes"
    return None if slots % _TILE == 0 else f"a pool of {slots} slots is not a multiple of {_TILE}"
