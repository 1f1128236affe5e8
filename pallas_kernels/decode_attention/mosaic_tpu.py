"""decode_attention for TPU: one pass over the segments; the next block is copied from HBM while one is computed.

All heads of a row are computed together: a block is a number of slots of each head's own segment. If all segments begin
at the same slot, which is the case for every method that gives all heads of a layer one budget, one copy moves a block
of all heads; else there is one copy per head.

XLA stores an array on a TPU in the order that needs the least padding to tiles of 8 x 128 numbers. For a pool
[B, K, P, H] this is the given order, or, if H does not fill the 128 lanes, [B, K, H, P], with the slots in the lanes.
The kernel reads both, so the pool is never copied into another order.

Whole blocks are copied, the last of a segment in units of 16 slots (128 if slots are lanes), so at most one unit at
each end contains slots that are not needed. The next copy runs while a block is computed, also across rows of the
batch. If the device has two cores, each takes half of the blocks of every row, and the results are joined by their
log-sum-exps.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim ·
C slots of a chunk (multiplied at once) · Z cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import tuning
from pallas_kernels.quantized import QuantizedPool
from pallas_kernels.tpu import FLOOR, LANES, MASKED, cores, device_kind, dot, interpreter, last_axis_is_slots

_UNIT = 16  # slots: a segment begins on a bfloat16 tile
_VMEM_BYTES = 15 * 2**20  # a kernel may use 16 MiB on every generation


def decode_attention_mosaic_tpu(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | QuantizedPool,
    v: Float[Array, "B #K P H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
    interpret: bool = False,
    op: str = "decode_attention",
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """Implements `decode_attention` for TPU. Blocks without a valid slot are not read. `op` selects the block sizes."""
    assert not isinstance(k, QuantizedPool) and not isinstance(v, QuantizedPool)
    plan = _plan(op, q, k, start, valid is not None, max_length)
    split = 1 if plan.blocks == 1 else cores()
    return _attend(q, k, v, start, length, valid, plan, split, max_length, return_mass, interpret, op)


# Under jit, so that it is traced once for all layers of a model, which have the same shapes.
@partial(jax.jit, static_argnums=(6, 7, 8, 9, 10, 11))
def _attend(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"],
    v: Float[Array, "B #K P H"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    plan: _Plan,
    split: int,
    max_length: int,
    return_mass: bool,
    interpret: bool,
    op: str,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    batch, heads, head_dim = q.shape
    kv_heads, most = plan.kv_heads, min(max_length, k.shape[2])
    start, length = start.astype(jnp.int32), jnp.clip(length, 0, most).astype(jnp.int32)
    shift = jax.lax.rem(start, plan.unit)  # slots that are read before the segment begins, because copies are aligned
    units = jnp.where(length > 0, _up(shift + length, plan.unit), 0)

    scalars = {
        "first": start - shift,
        "units": units,
        "longest": jnp.max(units, axis=1),
        "together": jnp.all(start == start[:, :1], axis=1),
    }
    vectors = {  # one row of the batch at a time
        "q": q.reshape(batch, kv_heads, -1, head_dim),
        "bounds": jnp.stack([shift, shift + length], axis=-1)[:, :, None],  # of the segment, relative to `first`
    }
    in_hbm = {"k": k, "v": v}
    block = (kv_heads, plan.block, head_dim)
    if plan.in_lanes:
        in_hbm = {name: jnp.swapaxes(x, 2, 3) for name, x in in_hbm.items()}
        block = (kv_heads, head_dim, plan.block)
    buffers: dict[str, tuple[tuple[int, ...], Any]] = {name: (block, x.dtype) for name, x in in_hbm.items()}
    outputs: dict[str, tuple[int, ...]] = {"out": vectors["q"].shape[1:], "lse": (*vectors["q"].shape[1:3], LANES)}
    if valid is not None:
        valid = valid[..., :most] & (jnp.arange(most) < length[..., None])
        moved = _move(valid, shift, plan.blocks * plan.block)
        scalars["wanted"] = jnp.any(moved.reshape(batch, kv_heads, plan.blocks, plan.block), axis=(1, 3))
        in_hbm["valid"] = moved.astype(jnp.float32)
        buffers["valid"] = ((kv_heads, plan.block), jnp.float32)
    if return_mass:
        outputs["logits"] = (heads, plan.blocks * plan.block)

    names = [*scalars, *vectors, *in_hbm, *outputs, *(f"{name} buffer" for name in buffers)]
    names += ["buffers used", "semaphores"]
    results = pl.pallas_call(
        lambda *refs: _Row(plan, dict(zip(names, refs, strict=True))).run(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(split, batch),
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
        out_shape=[jax.ShapeDtypeStruct((split, batch, *x), jnp.float32) for x in outputs.values()],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpreter(interpret),
        name=op,
    )(*(x.reshape(-1).astype(jnp.int32) for x in scalars.values()), *(vectors | in_hbm).values())
    out, lse = _join(results[0].reshape(split, batch, heads, head_dim), results[1][..., 0].reshape(split, batch, heads))
    if not return_mass:
        return out, lse, None
    group = heads // kv_heads
    logits = _move(jnp.sum(results[2], axis=0), -jnp.repeat(shift, group, axis=1), max_length)
    inside = jnp.arange(max_length) < length[..., None] if valid is None else _fit(valid, max_length)
    inside = jnp.repeat(inside, group, axis=1)
    return out, lse, jnp.where(inside, jnp.exp(jnp.where(inside, logits - lse[..., None], 0.0)), 0.0)


def unsupported(
    q: Array,
    k: Array | QuantizedPool,
    v: Array | QuantizedPool,
    start: Array,
    length: Array,
    valid: Array | None,
    max_length: int,
    return_mass: bool,
    op: str = "decode_attention",
) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    if isinstance(k, QuantizedPool) or isinstance(v, QuantizedPool):
        return "the pool is quantised"
    if k.dtype != v.dtype or k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"keys are {k.dtype} and values {v.dtype}, not both bfloat16 or both float32"
    slots, heads = k.shape[2], q.shape[1]
    if slots % _UNIT and slots > LANES and not last_axis_is_slots(*k.shape[2:]):
        return f"a pool of {slots} slots is not a multiple of {_UNIT}"
    plan = _plan(op, q, k, start, valid is not None, max_length)
    need = 4 * plan.block * plan.slot_bytes  # keys and values, this block and the next
    need += 16 * plan.chunk * plan.kv_heads * -(-heads // plan.kv_heads // 8) * 8  # logits, exponentials, masks
    need += 8 * heads * plan.blocks * plan.block * return_mass
    if need > _VMEM_BYTES:
        return (f"blocks of {plan.block} slots of {plan.slot_bytes} bytes, of a segment of up to {max_length}, need "
                f"{need / 2**20:.1f} of {_VMEM_BYTES >> 20} MiB of VMEM")  # fmt: skip
    return None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes in slots. They follow from the shapes and the tuning table."""

    batch: int
    kv_heads: int
    columns: int  # of the pool: kv_heads or 1
    in_lanes: bool  # the pool is read as [B, K, H, P]
    slot_bytes: int  # of one slot with its keys of all heads in VMEM
    unit: int  # copies are multiples of it
    one_unit: bool  # a unit is the whole pool
    chunk: int  # multiplied at once
    block: int  # copied at once
    blocks: int  # largest number of blocks of a segment
    masked: bool
    ragged: bool  # the last unit of the pool extends into the padding of its last tile, which may hold NaN

    @property
    def per_block(self) -> int:
        return self.block // self.unit

    @property
    def one_chunk(self) -> bool:
        """Whether the longest segment fits one chunk, which need not fill whole tiles."""
        return self.blocks * self.block == self.chunk


def _plan(op: str, q: Array, k: Array, start: Array, masked: bool, max_length: int) -> _Plan:
    batch, columns, slots, head_dim = k.shape
    kv_heads, in_lanes = start.shape[1], last_axis_is_slots(slots, head_dim)
    slot_bytes = kv_heads * (head_dim if in_lanes else -(-head_dim // LANES) * LANES) * k.dtype.itemsize
    if slots <= LANES:
        unit, chunk, block = slots if slots % _UNIT or in_lanes else _UNIT, slots, slots
    else:
        default = {"buffer_kib": 512}  # keys of a block: a copy this long reaches the memory's full bandwidth
        capacity = tuning.block(f"{op}/mosaic_tpu", device_kind(), default)["buffer_kib"] * 2**10
        unit = LANES if in_lanes else _UNIT
        chunk = LANES * max(1, min(4, 16 // kv_heads, slots // LANES))
        block = max(1, min(capacity // (chunk * slot_bytes), slots // chunk)) * chunk
    one_unit = unit == slots
    blocks = -(-min(max_length + unit - 1, -(-slots // unit) * unit) // block)
    ragged = in_lanes and slots > LANES and slots % LANES > 0
    return _Plan(batch, kv_heads, columns, in_lanes, slot_bytes, unit, one_unit, chunk, block, blocks, masked, ragged)


def _at_row(more: int, core: Any, row: Any, *_: Any) -> tuple[Any, ...]:
    """The index of a block of an output with `more` axes after those of cores and rows."""
    return core, row, *(0,) * more


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


def _join(out: Any, lse: Any) -> tuple[Any, Any]:
    """Joins the attention [Z, B, N, H] and log-sum-exps [Z, B, N] of all cores."""
    if len(out) == 1:
        return out[0], lse[0]
    total = jax.nn.logsumexp(lse, axis=0)
    share = jnp.exp(lse - jnp.where(jnp.isfinite(total), total, 0.0))
    return jnp.sum(out * share[..., None], axis=0), total


class _Row:
    """The work of one core for one row of the batch: block after block of all heads' segments."""

    def __init__(self, plan: _Plan, refs: dict[str, Any]):
        self.plan, self.refs = plan, refs
        self.core, self.row = pl.program_id(0), pl.program_id(1)
        self.q = refs["q"][0]  # [K, G, H]
        self.begin, self.end = (refs["bounds"][0, :, :, i : i + 1] for i in range(2))  # [K, 1, 1]

    def run(self) -> None:
        """Writes this core's part of the attention of one row."""
        refs, (kv_heads, group, head_dim) = self.refs, self.q.shape
        first, count = self.blocks_of(self.row)

        @pl.when(self.row == 0)
        def _() -> None:
            # Masked slots that no copy has filled are multiplied by zero, so they must not hold NaN.
            refs["v buffer"][...] = jnp.zeros_like(refs["v buffer"])
            refs["buffers used"][0] = 0
            self.copies(self.row, first, 0, lambda copy: copy.start())

        if "logits" in refs:
            refs["logits"][...] = jnp.zeros_like(refs["logits"])
        each = (kv_heads, group, 1)
        state = (jnp.full(each, FLOOR), jnp.zeros(each), jnp.zeros((kv_heads, group, head_dim)))
        last = first + count - 1
        peak, weight, total = jax.lax.fori_loop(first, last + 1, lambda i, state: self.block(i, last, state), state)
        some = weight > 0
        weight = jnp.where(some, weight, 1.0)
        refs["out"][0, 0] = total / weight
        lse = jnp.where(some, peak + jnp.log(weight), -jnp.inf)
        refs["lse"][0, 0] = jnp.broadcast_to(lse, (kv_heads, group, LANES))

    def blocks_of(self, row: Any) -> tuple[Any, Any]:
        """First block and number of blocks of this core; at least one, in which the next row's copies are started."""
        per_core = pl.cdiv(pl.cdiv(self.refs["longest"][row], self.plan.per_block), pl.num_programs(0))
        return self.core * per_core, jnp.maximum(per_core, 1)

    def copies(self, row: Any, i: Any, buffer: Any, act: Callable[[Any], None]) -> None:
        """Applies `act` (start or wait) to the copies that block i of a row needs, into one of the two buffers."""
        plan, refs = self.plan, self.refs

        def copy(name: str, source: Any, into: Any) -> None:
            semaphore = refs["semaphores"].at[("k", "v", "valid").index(name), buffer]
            act(pltpu.make_async_copy(refs[name].at[row, *source], refs[f"{name} buffer"].at[buffer, *into], semaphore))

        def segment(column: Any, into: Any, first: Any, units: Any) -> None:
            """Copies the block's slots of one head's segment, or of all heads, which then begin at the same slot."""
            units = jnp.clip(units - i * plan.per_block, 0, plan.per_block)
            if plan.masked:
                units = jnp.where(self.wanted(row, i), units, 0)

            def slots(offset: Any, count: int) -> None:
                source, target = (
                    _slice(x, plan.unit, count, plan.one_unit) for x in (first + i * plan.block + offset, offset)
                )
                for name in ("k", "v"):
                    if plan.in_lanes:
                        copy(name, (column, slice(None), source), (into, slice(None), target))
                    else:
                        copy(name, (column, source), (into, target))

            pl.when(units == plan.per_block)(lambda: slots(0, plan.block))

            @pl.when(units < plan.per_block)
            def _() -> None:
                jax.lax.fori_loop(0, units, lambda u, _: slots(u * plan.unit, plan.unit), None)

        def each() -> None:
            def one(head: Any, _: None) -> None:
                at = row * plan.kv_heads + head
                segment(head if plan.columns > 1 else 0, head, refs["first"][at], refs["units"][at])

            jax.lax.fori_loop(0, plan.kv_heads, one, None)

        if plan.masked:
            lanes = _slice(jnp.minimum(i, plan.blocks - 1) * plan.block, plan.block, plan.block, plan.one_chunk)
            pl.when(self.wanted(row, i))(lambda: copy("valid", (slice(None), lanes), ()))
        if plan.columns < plan.kv_heads:
            each()
            return
        together, everything = refs["together"][row] > 0, slice(None)
        first, longest = refs["first"][row * plan.kv_heads], refs["longest"][row]
        pl.when(together)(lambda: segment(everything, everything, first, longest))
        pl.when(~together)(each)

    def wanted(self, row: Any, i: Any) -> Any:
        """Whether block i of a row exists and has a valid slot."""
        exists = i * self.plan.per_block < self.refs["longest"][row]
        return exists & (self.refs["wanted"][row * self.plan.blocks + jnp.minimum(i, self.plan.blocks - 1)] > 0)

    def block(self, i: Any, last: Any, state: Any) -> Any:
        """Starts the copies of the next block, waits for those of block i, and adds it to the softmax."""
        buffer = self.refs["buffers used"][0] % 2

        @pl.when(i < last)
        def _() -> None:
            self.copies(self.row, i + 1, 1 - buffer, lambda copy: copy.start())

        @pl.when((i == last) & (self.row + 1 < self.plan.batch))
        def _() -> None:
            self.copies(self.row + 1, self.blocks_of(self.row + 1)[0], 1 - buffer, lambda copy: copy.start())

        self.copies(self.row, i, buffer, lambda copy: copy.wait())
        units = jnp.clip(self.refs["longest"][self.row] - i * self.plan.per_block, 0, self.plan.per_block)
        if self.plan.masked:
            units = jnp.where(self.wanted(self.row, i), units, 0)
        chunks = pl.cdiv(units * self.plan.unit, self.plan.chunk)
        state = jax.lax.fori_loop(0, chunks, lambda c, state: self.attend(c, buffer, i, state), state)
        self.refs["buffers used"][0] += 1
        return state

    def attend(self, c: Any, buffer: Any, i: Any, state: Any) -> Any:
        """Adds chunk c of block i to the online softmax."""
        (plan, refs), (peak, weight, total) = (self.plan, self.refs), state
        lanes = _slice(c * plan.chunk, plan.chunk, plan.chunk, plan.one_chunk)
        window = (slice(None), slice(None), lanes) if plan.in_lanes else (slice(None), lanes)
        keys, values = (refs[f"{name} buffer"][buffer, *window] for name in ("k", "v"))
        slot_axis = 2 if plan.in_lanes else 1
        logits = dot(self.q, keys, (2, 3 - slot_axis), batch=True) * self.q.shape[-1] ** -0.5  # [K, G, C]
        place = i * plan.block + c * plan.chunk + jax.lax.broadcasted_iota(jnp.int32, (1, 1, plan.chunk), 2)
        inside = (place >= self.begin) & (place < self.end)  # [K, 1, C]
        if plan.ragged:
            values = jnp.where(place < self.end, values, 0)
        if plan.masked:
            inside = inside & (refs["valid buffer"][buffer, :, lanes][:, None] > 0)
        if "logits" in refs:
            out = _slice(i * plan.block + c * plan.chunk, plan.chunk, plan.chunk, plan.one_chunk)
            refs["logits"][0, 0, :, out] = jnp.where(inside, logits, 0.0).reshape(-1, plan.chunk)
        logits = jnp.where(inside, logits, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
        rescale, p = jnp.exp(peak - new_peak), jnp.exp(logits - new_peak)
        total = total * rescale + dot(p.astype(values.dtype), values, (2, slot_axis), batch=True)
        return new_peak, weight * rescale + jnp.sum(p, axis=-1, keepdims=True), total


def _slice(begin: Any, multiple: int, count: int, from_start: bool) -> Any:
    """Slice of `count` elements from `begin`, a multiple of `multiple`; from 0, without alignment, if `from_start`."""
    return pl.ds(0, count) if from_start else pl.ds(pl.multiple_of(begin, multiple), count)
