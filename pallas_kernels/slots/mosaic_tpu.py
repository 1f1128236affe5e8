"""write_slots and swap_slots for TPU.

write_slots is for arrays that XLA stores with their slots in the lanes. XLA's scatter wants the head dim in the lanes,
so for such an array it would copy the whole array to that order and back. This kernel reads only the tile that contains
the slot, changes one lane of it, and writes it back. Several tiles are in flight at a time, but never two of the same
row and column, because they could be the same tile.

swap_slots copies each pair of slots to VMEM, exchanges it there, and writes it back. XLA packs two bfloat16 slots into
the words of one row, so a copy moves a unit of two slots of all heads (float32: one). Several pairs are exchanged at a
time. They must not share a unit, or one would overwrite the other; lists are ascending, so every second pair of a list
has a unit of its own.

Axes: B batch · K key heads · P slots · H head dim · E = B K entries · M bound on the pairs of a row ·
W entries or pairs at a time · U slots of a unit · A pools.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from pallas_kernels.slots.reference import SwapArguments, WriteArguments
from pallas_kernels.tpu import LANES, interpreter, last_axis_is_slots

_ENTRIES = 16  # largest number of tiles in flight
_PAIRS, _TILE = 8, 16  # pairs at a time; slots


@partial(jax.jit, static_argnames="interpret")
def write_slots_mosaic_tpu(args: WriteArguments, interpret: bool = False) -> Shaped[Array, "B #K P H"]:
    """Implements `write_slots` for TPU."""
    x, new, slot = args.x, args.new, args.slot
    (batch, columns, slots, head_dim), kv_heads = x.shape, new.shape[1]
    shared = columns < kv_heads  # then the entries of one head after the other, so that a wave has one entry per row
    if shared:
        new, slot = jnp.swapaxes(new, 0, 1), jnp.swapaxes(slot, 0, 1)
    independent = batch if shared else batch * kv_heads
    wave = max(n for n in range(1, _ENTRIES + 1) if independent % n == 0)
    lanes = min(LANES, slots)
    swapped = jnp.swapaxes(x, 2, 3)  # the order in memory, so this copies nothing
    if interpret:  # a TPU pads the last tile, the simulator does not
        swapped = jnp.pad(swapped, [(0, 0)] * 3 + [(0, -slots % lanes)])
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    result = pl.pallas_call(
        partial(_write, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec((head_dim, batch * kv_heads), lambda *_: (0, 0)), in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.VMEM((wave, head_dim, lanes), x.dtype), pltpu.SemaphoreType.DMA((wave,))],
        ),
        out_shape=jax.ShapeDtypeStruct(swapped.shape, x.dtype),
        input_output_aliases={2: 0},
        interpret=interpreter(interpret),
        name="write_slots",
    )(slot.reshape(-1).astype(jnp.int32), new.reshape(-1, head_dim).T, swapped)
    return jnp.swapaxes(result[..., :slots], 2, 3)


# [E]; [H, E]; the pool before; the pool [B, #K, H, P]; [W, H, lanes]; [W]
def _write(slot_ref: Any, new_ref: Any, _: Any, x_ref: Any, tiles: Any, semaphores: Any, *, slots: int) -> None:
    (batch, columns, *_), (wave, _, lanes) = x_ref.shape, tiles.shape
    kv_heads = new_ref.shape[1] // batch
    new = new_ref[...].astype(jnp.float32)
    entry = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1)
    lane = jax.lax.broadcasted_iota(jnp.int32, tiles.shape[1:], 1)

    def in_wave(w: Any, act: Callable[[Any, Any, Any], None]) -> None:
        """Calls act(number in the wave, number of the entry, its slot) for the entries of wave w to be written."""

        def entry_of_wave(j: Any, _: None) -> None:
            at = w * wave + j
            place = slot_ref[at]
            pl.when((place >= 0) & (place < slots))(lambda: act(j, at, place))

        jax.lax.fori_loop(0, wave, entry_of_wave, None)

    def tile(at: Any, place: Any) -> Any:
        shared = columns < kv_heads
        row, column = (jax.lax.rem(at, batch), 0) if shared else (at // kv_heads, jax.lax.rem(at, kv_heads))
        first = pl.ds(0, lanes) if slots <= LANES else pl.ds(pl.multiple_of(place // LANES * LANES, LANES), LANES)
        return x_ref.at[row, column, :, first]

    def read(j: Any, at: Any, place: Any) -> Any:
        return pltpu.make_async_copy(tile(at, place), tiles.at[j], semaphores.at[j])

    def written(j: Any, at: Any, place: Any) -> Any:
        return pltpu.make_async_copy(tiles.at[j], tile(at, place), semaphores.at[j])

    def change(j: Any, at: Any, place: Any) -> None:
        read(j, at, place).wait()
        value = jnp.sum(jnp.where(entry == at, new, 0.0), axis=1, keepdims=True)  # [H, 1]
        old = tiles[j].astype(jnp.float32)
        tiles[j] = jnp.where(lane == jax.lax.rem(place, LANES), value, old).astype(tiles.dtype)
        written(j, at, place).start()

    def run(w: Any, _: None) -> None:
        in_wave(w, lambda *entry: read(*entry).start())
        in_wave(w, change)
        in_wave(w, lambda *entry: written(*entry).wait())

    jax.lax.fori_loop(0, batch * kv_heads // wave, run, None)


@partial(jax.jit, static_argnames="interpret")
def swap_slots_mosaic_tpu(args: SwapArguments, interpret: bool = False) -> tuple[Array, ...]:
    """Implements `swap_slots` for TPU."""
    (batch, kv_heads, _, head_dim), dtype = args.pools[0].shape, args.pools[0].dtype
    lists = [x[:, None].astype(jnp.int32) for x in (args.first, args.second)]
    listed = pl.BlockSpec((1, 1, lists[0].shape[2]), lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM)
    in_hbm = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(args.pools)
    units = (_PAIRS, 2, len(args.pools), kv_heads, 4 // dtype.itemsize, head_dim)
    swapped = pl.pallas_call(
        _swap,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch,),
            in_specs=[listed, listed, *in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[pltpu.VMEM(units, dtype), pltpu.SemaphoreType.DMA((_PAIRS,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args.pools],
        input_output_aliases={3 + i: i for i in range(len(args.pools))},
        interpret=interpreter(interpret),
        name="swap_slots",
    )(args.count.astype(jnp.int32), *lists, *args.pools)
    return tuple(swapped)


# lists: twice [1, 1, M]; refs: A pools [B, K, P, H], the same as outputs, units [W, 2, A, K, U, H], semaphores [W]
def _swap(count_ref: Any, first_ref: Any, second_ref: Any, *refs: Any) -> None:
    *in_and_out, units, semaphores = refs
    lists, pools, row = (first_ref, second_ref), in_and_out[len(in_and_out) // 2 :], pl.program_id(0)
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
        begin = w // unit * unit * _PAIRS + jax.lax.rem(w, unit)

        def of_pairs(act: Callable[[Any, Any], None]) -> None:
            def of_pair(j: Any, _: None) -> None:
                i = begin + j * unit
                pl.when(i < count_ref[row])(lambda: act(j, i))

            jax.lax.fori_loop(0, _PAIRS, of_pair, None)

        for act in (start, exchange, finish):
            of_pairs(act)

    jax.lax.fori_loop(0, pl.cdiv(count_ref[row], unit * _PAIRS) * unit, wave, None)


def unsupported(args: WriteArguments | SwapArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    if isinstance(args, WriteArguments):
        return _cannot_write(args.x)
    kinds = {(x.shape, x.dtype) for x in args.pools}
    if len(kinds) > 1 or args.pools[0].ndim != 4 or args.pools[0].dtype not in (jnp.bfloat16, jnp.float32):
        return f"the pools are {kinds}, not [B, K, P, H] of one shape, all bfloat16 or all float32"
    slots, head_dim = args.pools[0].shape[2:]
    if last_axis_is_slots(slots, head_dim):
        return f"a head dim of {head_dim} with {slots} slots is stored with the slots in the lanes"
    return None if slots % _TILE == 0 else f"a pool of {slots} slots is not a multiple of {_TILE}"


def _cannot_write(x: Shaped[Array, "B #K P H"]) -> str | None:
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"entries are {x.dtype}, not bfloat16 or float32"
    if not last_axis_is_slots(*x.shape[2:]):
        return f"a head dim of {x.shape[3]} with {x.shape[2]} slots is stored in the lanes, where XLA writes in place"
    return None
