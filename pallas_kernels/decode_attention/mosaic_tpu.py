"""decode_attention for TPU: one pass over the segments; the next block is copied from HBM while one is computed.

All heads of a row are computed together: a block is a number of slots of each head's own segment. If all segments begin
at the same slot, which is the case for every method that gives all heads of a layer one budget, one copy moves a block
of all heads; else there is one copy per head.

XLA stores an array on a TPU in the order that needs the least padding to tiles of 8 x 128 numbers. For a pool
[B, K, P, H] this is the given order, or, if H does not fill the 128 lanes, [B, K, H, P], with the slots in the lanes.
The kernel reads both, so the pool is never copied into another order.

Whole blocks are copied, the last of a segment in units of 16 slots (128 if slots are lanes), so at most one unit at
each end contains slots that are not needed. If a mask excludes all slots of a unit, the unit is not copied. The next
copy runs while a block is computed, also across rows of the batch. If the device has two cores, each takes half of the
blocks of every row, and the results are joined by their log-sum-exps.

core_attention is the same with a mask, so it reads little only if the listed slots share tiles (`reads_tiles`).
`vlkv.cache.decode_state.group_core` arranges this with `swap_slots`. Copying single slots instead would not do. XLA
packs two bfloat16 slots into the words of one row, so the smallest copy holds two: for a tenth of the slots, chosen at
random, this is 1.9 times their bytes, and of tiles of 16 it is 8.1 times. Such a copy moves 1 to 16 KiB, and starting
it takes longer than that.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim ·
C slots of a chunk (multiplied at once) · Z cores.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_attention.reference import Attended, DecodeArguments
from pallas_kernels.decode_attention.tpu_row import ALL, NONE, SOME, UNIT, Plan, Row, plan
from pallas_kernels.denominator import join
from pallas_kernels.quantized import Quantized
from pallas_kernels.tpu import LANES, cores, interpreter, last_axis_is_slots

_VMEM_BYTES = 15 * 2**20  # a kernel may use 16 MiB on every generation


def decode_attention_mosaic_tpu(args: DecodeArguments, interpret: bool = False) -> Attended:
    """Implements `decode_attention` for TPU. Units without a valid slot are not read."""
    op, args = args.op, _masked(args)
    sizes = plan(args)
    return _attend(args, sizes, 1 if sizes.blocks == 1 else cores(), interpret, op)


def _masked(args: DecodeArguments) -> DecodeArguments:
    """The arguments with listed slots and text as a mask."""
    if args.listed is None:
        return args
    offsets, count, text = args.listed.offsets, args.listed.count, args.listed.text
    place = jnp.arange(args.max_length)
    listed = jnp.where(jnp.arange(offsets.shape[1]) < count[:, None], offsets, args.max_length)
    row = jnp.arange(offsets.shape[0])[:, None]
    core = jnp.zeros((offsets.shape[0], args.max_length), bool).at[row, listed].set(True, mode="drop")
    chosen = core[:, None] | (place >= text[..., None])
    chosen = chosen if args.valid is None else chosen & args.valid
    return dataclasses.replace(args, valid=chosen, listed=None)


class _Operands(NamedTuple):
    """What the kernel reads and writes, by name."""

    scalars: dict[str, Any]
    vectors: dict[str, Any]  # one row of the batch at a time
    in_hbm: dict[str, Any]
    buffers: dict[str, tuple[tuple[int, ...], Any]]  # shapes and dtypes, each twice
    outputs: dict[str, tuple[int, ...]]  # of one row


# Under jit, so that it is traced once for all layers of a model, which have the same shapes.
@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _attend(args: DecodeArguments, plan: Plan, split: int, interpret: bool, op: str) -> Attended:
    q, valid = args.q, args.valid
    (batch, heads, head_dim), most = q.shape, min(args.max_length, args.k.shape[2])
    start, length = args.start.astype(jnp.int32), jnp.clip(args.length, 0, most).astype(jnp.int32)
    shift = jax.lax.rem(start, plan.unit)  # slots that are read before the segment begins, because copies are aligned
    units = jnp.where(length > 0, _up(shift + length, plan.unit), 0)
    scalars = {
        "first": start - shift,
        "units": units,
        "longest": jnp.max(units, axis=1),
        "together": jnp.all(start == start[:, :1], axis=1),
    }
    vectors = {
        "q": q.reshape(batch, plan.kv_heads, -1, head_dim),
        "bounds": jnp.stack([shift, shift + length], axis=-1)[:, :, None],  # of the segment, relative to `first`
    }
    in_hbm: dict[str, Any] = {"k": args.k, "v": args.v}
    block = (plan.kv_heads, plan.block, head_dim)
    if plan.in_lanes:
        in_hbm = {name: jnp.swapaxes(x, 2, 3) for name, x in in_hbm.items()}
        block = (plan.kv_heads, head_dim, plan.block)
    buffers: dict[str, Any] = {name: (block, x.dtype) for name, x in in_hbm.items()}
    outputs = {"out": vectors["q"].shape[1:], "lse": (*vectors["q"].shape[1:3], LANES)}
    if valid is not None:
        valid = valid[..., :most] & (jnp.arange(most) < length[..., None])
        moved = _move(valid, shift, plan.blocks * plan.block)
        scalars |= _wanted(moved, scalars["longest"], plan)
        in_hbm["valid"] = moved.astype(jnp.float32)
        buffers["valid"] = ((plan.kv_heads, plan.block), jnp.float32)
    if args.return_mass:
        outputs["logits"] = (heads, plan.blocks * plan.block)
    results = _call(_Operands(scalars, vectors, in_hbm, buffers, outputs), plan, split, interpret, op)
    parts = results[0].reshape(split, batch, heads, head_dim), results[1][..., 0].reshape(split, batch, heads)
    out, lse = join(*parts, axis=-1)
    if not args.return_mass:
        return out, lse, None
    group = heads // plan.kv_heads
    logits = _move(jnp.sum(results[2], axis=0), -jnp.repeat(shift, group, axis=1), args.max_length)
    inside = jnp.arange(args.max_length) < length[..., None] if valid is None else _fit(valid, args.max_length)
    inside = jnp.repeat(inside, group, axis=1)
    return out, lse, jnp.where(inside, jnp.exp(jnp.where(inside, logits - lse[..., None], 0.0)), 0.0)


def _call(operands: _Operands, plan: Plan, split: int, interpret: bool, op: str) -> Any:
    scalars, vectors, in_hbm, buffers, outputs = operands
    names = [*scalars, *vectors, *in_hbm, *outputs, *(f"{name} buffer" for name in buffers)]
    names += ["buffers used", "semaphores"]
    return pl.pallas_call(
        lambda *refs: Row(plan, dict(zip(names, refs, strict=True))).run(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(split, plan.batch),
            in_specs=[
                *(pl.BlockSpec((1, *x.shape[1:]), lambda z, b, *_: (b, 0, 0, 0)) for x in vectors.values()),
                *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in in_hbm),
            ],
            out_specs=[pl.BlockSpec((1, 1, *x), partial(_at_row, len(x))) for x in outputs.values()],
            scratch_shapes=[
                *(pltpu.VMEM((2, *shape), dtype) for shape, dtype in buffers.values()),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((len(in_hbm), 2)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((split, plan.batch, *x), jnp.float32) for x in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpreter(interpret),
        name=op,
    )(*(x.reshape(-1).astype(jnp.int32) for x in scalars.values()), *(vectors | in_hbm).values())


def unsupported(args: DecodeArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    q, k, v, max_length = args.q, args.k, args.v, args.max_length
    if isinstance(k, Quantized) or isinstance(v, Quantized):
        return "the pool is quantised"
    if k.dtype != v.dtype or k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype} and values {v.dtype}, not both bfloat16 or both float32"
    slots, heads = k.shape[2], q.shape[1]
    if slots % UNIT and slots > LANES and not last_axis_is_slots(*k.shape[2:]):
        return f"a pool of {slots} slots is not a multiple of {UNIT}"
    sizes = plan(args)
    need = 4 * sizes.block * sizes.slot_bytes  # keys and values, this block and the next
    need += 16 * sizes.chunk * sizes.kv_heads * -(-heads // sizes.kv_heads // 8) * 8  # logits, exponentials, masks
    need += 8 * heads * sizes.blocks * sizes.block * args.return_mass
    if need > _VMEM_BYTES:
        blocks = f"blocks of {sizes.block} slots of {sizes.slot_bytes} bytes, of a segment of up to {max_length}"
        return f"{blocks}, need {need / 2**20:.1f} of {_VMEM_BYTES >> 20} MiB of VMEM"
    return None


def _wanted(valid: Any, longest: Any, plan: Plan) -> dict[str, Any]:
    """Which units have a valid slot in any head: a summary of each block, and the bits of the units of each chunk."""
    batch = valid.shape[0]
    units = jnp.any(valid.reshape(batch, plan.kv_heads, -1, plan.unit), axis=(1, 3))
    missing = ~units & (jnp.arange(units.shape[1]) < longest[:, None])
    used, gaps = (jnp.any(x.reshape(batch, plan.blocks, -1), axis=2) for x in (units, missing))
    bits = units.reshape(batch, -1, plan.per_chunk).astype(jnp.uint32) << jnp.arange(plan.per_chunk, dtype=jnp.uint32)
    words = jax.lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32)
    return {"wanted": jnp.where(used, jnp.where(gaps, SOME, ALL), NONE), "wanted units": words}


def _at_row(axes: int, core: Any, row: Any, *_: Any) -> tuple[Any, ...]:
    """The index of a block of an output with `axes` axes after those of cores and rows."""
    return core, row, *(0,) * axes


def _up(x: Any, unit: int) -> Any:
    """x / unit rounded up, for x >= 0. `//` would handle signs too, with ten more operations per layer."""
    return jax.lax.div(x + (unit - 1), unit)


def _move(x: Any, by: Any, size: int) -> Any:
    """Shifts x [B, K, M] by `by` [B, K] (|by| < 128) along the last axis, into an axis of `size`, padded with zeros.

    Costs nothing if all of `by` are 0.
    """

    def windows(x: Any) -> Any:
        x = _fit(jnp.pad(x, [(0, 0), (0, 0), (LANES, 0)]), size + 2 * LANES)
        return jax.vmap(jax.vmap(lambda one, by: jax.lax.dynamic_slice_in_dim(one, LANES - by, size)))(x, by)

    return jax.lax.cond(jnp.any(by != 0), windows, lambda x: _fit(x, size), x)


def _fit(x: Any, size: int) -> Any:
    """Cuts or zero-pads the last axis to `size`."""
    return jnp.pad(x[..., :size], [(0, 0)] * (x.ndim - 1) + [(0, max(0, size - x.shape[-1]))])
