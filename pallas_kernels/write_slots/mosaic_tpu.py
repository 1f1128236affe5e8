"""write_slots for TPU, for arrays that XLA stores with their slots in the lanes.

XLA's scatter wants the head dim in the lanes. For such an array it would therefore copy the whole array to that order
and back. This kernel reads only the tile that contains the slot, changes one lane of it, and writes it back. Several
tiles are in flight at a time, but never two of the same row and column, because they could be the same tile.

Axes: B batch · K key heads · P slots · H head dim · E = B K entries · W entries of a wave.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.tpu import LANES, interpreter, last_axis_is_slots
from pallas_kernels.write_slots.reference import WriteArguments

_WAVE = 16  # largest number of tiles in flight


@partial(jax.jit, static_argnames="interpret")
def write_slots_mosaic_tpu(args: WriteArguments, interpret: bool = False) -> Float[Array, "B #K P H"]:
    """Implements `write_slots` for TPU."""
    x, new, slot = args.x, args.new, args.slot
    (batch, columns, slots, head_dim), kv_heads = x.shape, new.shape[1]
    shared = columns < kv_heads  # then the entries of one head after the other, so that a wave has one entry per row
    if shared:
        new, slot = jnp.swapaxes(new, 0, 1), jnp.swapaxes(slot, 0, 1)
    independent = batch if shared else batch * kv_heads
    wave = max(n for n in range(1, _WAVE + 1) if independent % n == 0)
    lanes = min(LANES, slots)
    swapped = jnp.swapaxes(x, 2, 3)  # the order in memory, so this copies nothing
    if interpret:  # a TPU pads the last tile, the simulator does not
        swapped = jnp.pad(swapped, [(0, 0)] * 3 + [(0, -slots % lanes)])
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    result = pl.pallas_call(
        partial(_kernel, slots=slots),
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
def _kernel(slot_ref: Any, new_ref: Any, _: Any, x_ref: Any, tiles: Any, semaphores: Any, *, slots: int) -> None:
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


def unsupported(args: WriteArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    x = args.x
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"entries are {x.dtype}, not bfloat16 or float32"
    if not last_axis_is_slots(*x.shape[2:]):
        return f"a head dim of {x.shape[3]} with {x.shape[2]} slots is stored in the lanes, where XLA writes in place"
    return None
