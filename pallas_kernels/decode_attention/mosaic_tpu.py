"""decode_attention for TPU: one pass over the segments; the next block is copied from HBM while one is computed.

The pool [P, K, H] is read as rows of [P K, H] (a bitcast if K is a power of two and H fills the lanes), all heads of a
block at once. q [N, H] times [C K, H] is one matrix product in which query head n uses the columns of its own key head
and the others are masked. The extra columns cost nothing, since memory bandwidth is the limit. Heads whose segments
begin at the same slot share a pass, which is the case for every method that gives all heads of a layer one budget.
Each further start costs one more pass over all heads of its segment.

Whole blocks are copied, the last of a segment in units of 16 slots, so at most one incomplete unit is read in vain. The
next copy runs while a block is computed, also across rows of the batch. If the device has two cores, each takes half of
the blocks of every row, and the results are joined by their log-sum-exps.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim ·
C slots of a chunk (multiplied at once) · R = C K rows of a chunk · Z cores.
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
from pallas_kernels.tpu import FLOOR, LANES, MASKED, cores, device_kind, dot, dot_exact, interpreter

_UNIT = 16  # slots: a segment begins on a bfloat16 tile
_VMEM_BYTES = 15 * 2**20  # a kernel may use 16 MiB on every generation


def decode_attention_mosaic_tpu(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P #K H"] | QuantizedPool,
    v: Float[Array, "B P #K H"] | QuantizedPool,
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
    plan = _plan(op, q, k, start, valid is not None, max_length, return_mass)
    split = 1 if plan.blocks == 1 else cores()
    return _attend(q, k, v, start, length, valid, plan, split, max_length, return_mass, interpret, op)


# Under jit, so that it is traced once for all layers of a model, which have the same shapes.
@partial(jax.jit, static_argnums=(6, 7, 8, 9, 10, 11))
def _attend(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P #K H"],
    v: Float[Array, "B P #K H"],
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
    kv_heads, columns, most = plan.kv_heads, plan.columns, min(max_length, k.shape[1])
    group = heads // kv_heads
    start, length = start.astype(jnp.int32), jnp.clip(length, 0, most).astype(jnp.int32)
    shift = jax.lax.rem(start, plan.unit)  # slots that are read before the segment begins, because copies are aligned
    units, ends = _passes(start, jnp.where(length > 0, _up(shift + length, plan.unit), 0), plan.per_block)
    of_query = [jnp.repeat(x, group, axis=1) for x in (start, start + length)]
    key_head = jnp.broadcast_to(jax.lax.div(jnp.arange(heads, dtype=jnp.int32), group), (batch, heads))
    row = jnp.arange(plan.chunk * columns, dtype=jnp.int32)

    scalars = {"start": start, "units": units, "ends": ends}
    vectors = {"q": q, "bounds": jnp.stack([*of_query, key_head], axis=-1)}  # [B, ..], one row of the batch at a time
    constants = {"columns": jnp.stack([jax.lax.div(row, columns), jax.lax.rem(row, columns)])}  # slot and column
    in_hbm = {"k": k.reshape(batch, -1, head_dim), "v": v.reshape(batch, -1, head_dim)}
    buffers = {name: ((plan.block * columns, head_dim), k.dtype) for name in in_hbm}
    outputs = {"out": (heads, head_dim), "lse": (heads, LANES)}
    if plan.lined_up:
        constants["spread"] = (constants["columns"][:1] == jnp.arange(plan.chunk)[:, None]).astype(jnp.bfloat16)
    if valid is not None:
        valid = valid[..., :most] & (jnp.arange(most) < length[..., None])
        moved = _move(valid, shift, plan.blocks * plan.block)
        scalars["wanted"] = jnp.any(moved.reshape(batch, kv_heads, plan.blocks, plan.block), axis=(1, 3))
        in_hbm["valid"] = moved.astype(jnp.bfloat16)
        buffers["valid"] = ((kv_heads, plan.block), jnp.bfloat16)
    if return_mass:
        outputs["logits"] = (heads, plan.blocks * plan.block)

    names = [*scalars, *vectors, *constants, *in_hbm, *outputs, *(f"{name} buffer" for name in buffers)]
    names += ["turn", "semaphores"]
    results = pl.pallas_call(
        lambda *refs: _Pass(plan, dict(zip(names, refs, strict=True))).run(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(split, batch),
            in_specs=[
                *(pl.BlockSpec((1, *x.shape[1:]), lambda z, b, *_: (b, 0, 0)) for x in vectors.values()),
                *(pl.BlockSpec(x.shape, lambda z, b, *_: (0, 0)) for x in constants.values()),
                *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in in_hbm),
            ],
            out_specs=[pl.BlockSpec((1, 1, *x), lambda z, b, *_: (z, b, 0, 0)) for x in outputs.values()],
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
    )(*(x.reshape(-1).astype(jnp.int32) for x in scalars.values()), *(vectors | constants | in_hbm).values())
    out, lse = _join(results[0], results[1][..., 0])
    if not return_mass:
        return out, lse, None
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
    slots, heads = k.shape[1], q.shape[1]
    if slots % _UNIT and slots > LANES:
        return f"a pool of {slots} slots is not a multiple of {_UNIT}"
    plan = _plan(op, q, k, start, valid is not None, max_length, return_mass)
    rows = plan.columns * plan.chunk
    need = 4 * plan.block * _slot_bytes(k)  # keys and values, this block and the next
    need += 16 * heads * rows  # logits, their exponentials, masks
    need += 4 * plan.chunk * rows * plan.lined_up + 8 * heads * plan.blocks * plan.block * return_mass
    if need > _VMEM_BYTES:
        return (f"blocks of {plan.block} slots of {_slot_bytes(k)} bytes, of a segment of up to {max_length}, need "
                f"{need / 2**20:.1f} of {_VMEM_BYTES >> 20} MiB of VMEM")  # fmt: skip
    return None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes in slots. They follow from the shapes and the tuning table."""

    batch: int
    kv_heads: int
    columns: int  # of the pool: kv_heads or 1
    unit: int  # copies are multiples of it
    chunk: int  # multiplied at once
    block: int  # copied at once
    blocks: int  # largest number of blocks of a segment
    masked: bool
    lined_up: bool  # slots are lanes, because a mask is read or the mass is written

    @property
    def per_block(self) -> int:
        return self.block // self.unit

    @property
    def small(self) -> bool:
        """Whether the pool is a single chunk, which need not fill whole tiles."""
        return self.blocks * self.block == self.chunk


def _plan(op: str, q: Array, k: Array, start: Array, masked: bool, max_length: int, return_mass: bool) -> _Plan:
    batch, slots, columns, _ = k.shape
    lined_up = masked or return_mass
    if slots <= LANES:
        unit, chunk, block = slots if slots % _UNIT else _UNIT, slots, slots
    else:
        default = {"buffer_kib": 512}  # keys of a block: a copy this long reaches the memory's full bandwidth
        capacity = tuning.block(f"{op}/mosaic_tpu", device_kind(), default)["buffer_kib"] * 2**10
        unit = _UNIT
        chunk = LANES if lined_up else min(max(2048 // columns // unit, 1), slots // unit, 32) * unit
        block = max(1, min(capacity // (chunk * _slot_bytes(k)), slots // chunk)) * chunk
    blocks = -(-min(max_length + unit - 1, slots) // block)
    return _Plan(batch, start.shape[1], columns, unit, chunk, block, blocks, masked, lined_up)


def _slot_bytes(k: Array) -> int:
    """Bytes of one slot of the pool in VMEM, where heads are padded to whole lanes."""
    return k.shape[2] * -(-k.shape[3] // LANES) * LANES * k.dtype.itemsize


def _up(x: Any, unit: int) -> Any:
    """x / unit rounded up, for x >= 0. `//` would handle signs too, with ten more operations per layer."""
    return jax.lax.div(x + (unit - 1), unit)


def _passes(start: Any, units: Any, per_block: int) -> tuple[Any, Any]:
    """Plans the passes over the segments: heads that begin at the same slot share the pass of the first of them.

    Returns:
        Units of each head's pass (0 if the head shares another's), and the cumulated number of blocks, both [B, K].
    """
    heads = jnp.arange(start.shape[1])
    together = start[:, :, None] == start[:, None, :]  # [B, K, K]
    leader = ~jnp.any(together & (heads[None, :] < heads[:, None]), axis=-1)
    units = jnp.where(leader, jnp.max(jnp.where(together, units[:, None], 0), axis=-1), 0)
    blocks = _up(units, per_block)
    return units, jnp.sum(jnp.where(heads[None, :] <= heads[:, None], blocks[:, None], 0), axis=-1)


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


class _Pass:
    """The work of one core for one row of the batch: a sequence of visits, each to one block of one pass."""

    def __init__(self, plan: _Plan, refs: dict[str, Any]):
        self.plan, self.refs = plan, refs
        self.core, self.row = pl.program_id(0), pl.program_id(1)
        self.q, self.bounds, self.columns = refs["q"][0], refs["bounds"][0], refs["columns"][...]
        # [N, R]: rows that hold the query head's own key head
        self.own = self.columns[1:2] == jax.lax.rem(self.bounds[:, 2:3], jnp.int32(plan.columns))

    def run(self) -> None:
        """Writes this core's part of the attention of one row."""
        refs, (heads, head_dim) = self.refs, self.q.shape
        first, count = self.visits(self.row)

        @pl.when(self.row == 0)
        def _() -> None:
            # Masked slots that no copy has filled are multiplied by zero, so they must not hold NaN.
            refs["v buffer"][...] = jnp.zeros_like(refs["v buffer"])
            refs["turn"][0] = 0
            self.copies(self.row, first, 0, lambda copy: copy.start())

        if "logits" in refs:
            refs["logits"][...] = jnp.zeros_like(refs["logits"])
        state = (jnp.full((heads, 1), FLOOR), jnp.zeros((heads, 1)), jnp.zeros((heads, head_dim)))
        last = first + count - 1
        peak, weight, total = jax.lax.fori_loop(first, last + 1, lambda i, state: self.visit(i, last, state), state)
        some = weight > 0
        weight = jnp.where(some, weight, 1.0)
        refs["out"][0, 0] = total / weight
        refs["lse"][0, 0] = jnp.broadcast_to(jnp.where(some, peak + jnp.log(weight), -jnp.inf), (heads, LANES))

    def visits(self, row: Any) -> tuple[Any, Any]:
        """First visit and number of visits of this core; at least one, in which the next row's copies are started."""
        total = self.refs["ends"][(row + 1) * self.plan.kv_heads - 1]
        per_core = pl.cdiv(total, pl.num_programs(0))
        return self.core * per_core, jnp.maximum(per_core, 1)

    def locate(self, row: Any, i: Any) -> tuple[Any, Any, Any]:
        """For visit i of a row: first slot of its pass, index of its block in that pass, and units to read."""
        plan, refs = self.plan, self.refs
        first, last = row * plan.kv_heads, (row + 1) * plan.kv_heads - 1
        at = jax.lax.while_loop(lambda h: (h < last) & (refs["ends"][h] <= i), lambda h: h + 1, first)
        units = refs["units"][at]
        index = i - (refs["ends"][at] - pl.cdiv(units, plan.per_block))
        size = jnp.clip(units - index * plan.per_block, 0, plan.per_block)
        index = jnp.minimum(index, plan.blocks - 1)
        if plan.masked:
            size = jnp.where(refs["wanted"][row * plan.blocks + index] > 0, size, 0)
        return refs["start"][at], index, size

    def copies(self, row: Any, i: Any, turn: Any, act: Callable[[Any], None]) -> None:
        """Applies `act` (start or wait) to the copies that visit i of a row needs, into buffer `turn` (0 or 1)."""
        plan, refs = self.plan, self.refs
        begin, index, size = self.locate(row, i)
        place = begin // plan.unit * plan.unit + index * plan.block

        def copy(name: str, source: Any, into: Any) -> None:
            semaphore = refs["semaphores"].at[("k", "v", "valid").index(name), turn]
            act(pltpu.make_async_copy(refs[name].at[row, *source], refs[f"{name} buffer"].at[turn, *into], semaphore))

        def slots(offset: Any, count: int) -> None:
            known = plan.small and plan.unit == plan.block
            source, into = (_slice(x, plan.columns * plan.unit, plan.columns * count, known)
                            for x in ((place + offset) * plan.columns, offset * plan.columns))  # fmt: skip
            for name in ("k", "v"):
                copy(name, (source,), (into,))

        def unit(u: Any, _: None) -> None:
            slots(u * plan.unit, plan.unit)

        if plan.masked:
            lanes = _slice(index * plan.block, plan.block, plan.block, plan.small)
            pl.when(size > 0)(lambda: copy("valid", (slice(None), lanes), ()))
        pl.when(size == plan.per_block)(lambda: slots(0, plan.block))
        pl.when(size < plan.per_block)(lambda: jax.lax.fori_loop(0, size, unit, None))

    def visit(self, i: Any, last: Any, state: Any) -> Any:
        """Starts the copies of the next visit, waits for those of visit i, and adds its block to the softmax."""
        turn = self.refs["turn"][0] % 2

        @pl.when(i < last)
        def _() -> None:
            self.copies(self.row, i + 1, 1 - turn, lambda copy: copy.start())

        @pl.when((i == last) & (self.row + 1 < self.plan.batch))
        def _() -> None:
            self.copies(self.row + 1, self.visits(self.row + 1)[0], 1 - turn, lambda copy: copy.start())

        self.copies(self.row, i, turn, lambda copy: copy.wait())
        begin, index, size = self.locate(self.row, i)
        chunks = pl.cdiv(size * self.plan.unit, self.plan.chunk)
        state = jax.lax.fori_loop(0, chunks, lambda c, state: self.attend(c, turn, begin, index, state), state)
        self.refs["turn"][0] += 1
        return state

    def attend(self, c: Any, turn: Any, begin: Any, index: Any, state: Any) -> Any:
        """Adds chunk c of a block to the online softmax."""
        (plan, refs), (peak, weight, total) = (self.plan, self.refs), state
        rows = _slice(c * plan.chunk * plan.columns, plan.unit * plan.columns, plan.chunk * plan.columns, plan.small)
        logits = dot(self.q, refs["k buffer"][turn, rows], (1, 1)) * self.q.shape[-1] ** -0.5  # [N, R]
        slots = self.columns[0:1] + (begin // plan.unit * plan.unit + index * plan.block + c * plan.chunk)
        of_pass = self.bounds[:, 0:1] == begin
        inside = self.own & of_pass & (slots >= begin) & (slots < self.bounds[:, 1:2])
        if plan.masked:
            lanes = _slice(c * plan.chunk, plan.chunk, plan.chunk, plan.small)
            inside = inside & self.chosen(refs["valid buffer"][turn, :, lanes])
        if "logits" in refs:
            lanes = _slice(index * plan.block + c * plan.chunk, plan.chunk, plan.chunk, plan.small)
            seen = dot_exact(jnp.where(inside, logits, 0.0), refs["spread"][...], (1, 1))  # [N, C]
            refs["logits"][0, 0, :, lanes] = jnp.where(of_pass, seen, refs["logits"][0, 0, :, lanes])
        logits = jnp.where(inside, logits, MASKED)
        both = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
        old, p = jnp.exp(peak - both), jnp.exp(logits - both)
        values = refs["v buffer"][turn, rows]
        total = total * old + dot(p.astype(values.dtype), values, (1, 0))
        return both, weight * old + jnp.sum(p, axis=-1, keepdims=True), total

    def chosen(self, valid: Any) -> Any:
        """Spreads a mask over slots [K, C] to a mask over query heads and the rows of a chunk [N, R]."""
        key_head = jax.lax.broadcasted_iota(jnp.int32, (1, self.plan.kv_heads), 1)
        of_head = (key_head == self.bounds[:, 2:3]).astype(jnp.bfloat16)  # [N, K]
        by_query = dot(of_head, valid, (1, 0)).astype(jnp.bfloat16)  # [N, C]
        return dot(by_query, self.refs["spread"][...], (1, 0)) > 0.5


def _slice(begin: Any, multiple: int, count: int, known: bool) -> Any:
    """Slice of `count` elements from `begin`, a multiple of `multiple`; from 0, without alignment, if `known`."""
    return pl.ds(0, count) if known else pl.ds(pl.multiple_of(begin, multiple), count)
