"""decode_attention for TPU: sizes of blocks, and what one core does for one row, in the kernel of `mosaic_tpu`.

Axes: B batch · K key heads · G query heads of each · P pool slots · H head dim ·
C slots of a chunk (multiplied at once).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.decode_attention.reference import DecodeArguments
from pallas_kernels.tpu import FLOOR, LANES, MASKED, dot, last_axis_is_slots

UNIT = 16  # slots: a segment begins on a bfloat16 tile
_BUFFER = 2**19  # bytes of the keys of a block: a copy this long reaches the memory's full bandwidth
NONE, SOME, ALL = range(3)  # how many of a block's units have a valid slot


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes in slots. They follow from the shapes."""

    batch: int
    kv_heads: int
    columns: int  # of the pool: kv_heads or 1
    in_lanes: bool  # the pool is read as [B, K, H, P]
    slot_bytes: int  # of one slot with its keys of all heads in VMEM
    unit: int  # copies are multiples of it
    one_unit: bool  # a unit is the whole pool
    chunk: int  # multiplied at once; at most 32 units
    block: int  # copied at once
    blocks: int  # largest number of blocks of a segment
    masked: bool
    ragged: bool  # the last unit of the pool extends into the padding of its last tile, which may hold NaN

    @property
    def per_block(self) -> int:
        """Units of a block."""
        return self.block // self.unit

    @property
    def per_chunk(self) -> int:
        """Units of a chunk."""
        return self.chunk // self.unit

    @property
    def one_chunk(self) -> bool:
        """Whether the longest segment fits one chunk, which need not fill whole tiles."""
        return self.blocks * self.block == self.chunk


def plan(args: DecodeArguments) -> Plan:
    """The sizes for a kernel of decode_attention or core_attention."""
    batch, columns, slots, head_dim = args.k.shape
    kv_heads, in_lanes, masked = args.start.shape[1], last_axis_is_slots(slots, head_dim), args.valid is not None
    slot_bytes = kv_heads * (head_dim if in_lanes else -(-head_dim // LANES) * LANES) * args.k.dtype.itemsize
    if slots <= LANES:
        unit, chunk, block = slots if slots % UNIT or in_lanes else UNIT, slots, slots
    else:
        unit = LANES if in_lanes else UNIT
        chunk = LANES * max(1, min(4, 16 // kv_heads, slots // LANES))
        block = max(1, min(_BUFFER // (chunk * slot_bytes), slots // chunk)) * chunk
    one_unit = unit == slots
    blocks = -(-min(args.max_length + unit - 1, -(-slots // unit) * unit) // block)
    ragged = in_lanes and slots > LANES and slots % LANES > 0
    return Plan(batch, kv_heads, columns, in_lanes, slot_bytes, unit, one_unit, chunk, block, blocks, masked, ragged)


class Row:
    """The work of one core for one row of the batch: block after block of all heads' segments."""

    def __init__(self, plan: Plan, refs: dict[str, Any]):
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
        filled = weight > 0
        weight = jnp.where(filled, weight, 1.0)
        refs["out"][0, 0] = total / weight
        lse = jnp.where(filled, peak + jnp.log(weight), -jnp.inf)
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

            def slots(offset: Any, count: int) -> None:
                source, target = (
                    _slice(x, plan.unit, count, plan.one_unit) for x in (first + i * plan.block + offset, offset)
                )
                channels = (slice(None),) if plan.in_lanes else ()
                for name in ("k", "v"):
                    copy(name, (column, *channels, source), (into, *channels, target))

            if plan.masked:
                wanted, copied = self.wanted(row, i), units
                pl.when(wanted == SOME)(lambda: self.copy_wanted(row, i, copied, slots))
                units = jnp.where(wanted == ALL, units, 0)
            pl.when(units == plan.per_block)(lambda: slots(0, plan.block))

            @pl.when(units < plan.per_block)
            def _() -> None:
                jax.lax.fori_loop(0, units, lambda u, _: slots(u * plan.unit, plan.unit), None)

        def by_head() -> None:
            def of_head(head: Any, _: None) -> None:
                at = row * plan.kv_heads + head
                segment(head if plan.columns > 1 else 0, head, refs["first"][at], refs["units"][at])

            jax.lax.fori_loop(0, plan.kv_heads, of_head, None)

        if plan.masked:
            lanes = _slice(jnp.minimum(i, plan.blocks - 1) * plan.block, plan.block, plan.block, plan.one_chunk)
            pl.when(self.wanted(row, i) != NONE)(lambda: copy("valid", (slice(None), lanes), ()))
        if plan.columns < plan.kv_heads:
            by_head()
            return
        together, everything = refs["together"][row] > 0, slice(None)
        first, longest = refs["first"][row * plan.kv_heads], refs["longest"][row]
        pl.when(together)(lambda: segment(everything, everything, first, longest))
        pl.when(~together)(by_head)

    def copy_wanted(self, row: Any, i: Any, units: Any, slots: Callable[[Any, int], None]) -> None:
        """Calls slots(offset, count) for chunks of block i whose units all have a valid slot, else for single units."""
        plan = self.plan

        def of_chunk(c: Any, _: None) -> None:
            word, last = self.wanted_units(row, i, c), (c + 1) * plan.per_chunk
            whole = (word == (1 << plan.per_chunk) - 1 - (plan.per_chunk == 32) * 2**32) & (last <= units)
            pl.when(whole)(lambda: slots(c * plan.chunk, plan.chunk))

            def of_unit(u: Any, _: None) -> None:
                number = c * plan.per_chunk + u
                wanted = (jax.lax.shift_right_logical(word, u) & 1 > 0) & (number < units)
                pl.when(wanted)(lambda: slots(number * plan.unit, plan.unit))

            pl.when(~whole & (word != 0))(lambda: jax.lax.fori_loop(0, plan.per_chunk, of_unit, None))

        jax.lax.fori_loop(0, plan.block // plan.chunk, of_chunk, None)

    def wanted(self, row: Any, i: Any) -> Any:
        """How many units of block i of a row have a valid slot: NONE (or no such block), SOME or ALL."""
        exists = i * self.plan.per_block < self.refs["longest"][row]
        wanted = self.refs["wanted"][row * self.plan.blocks + jnp.minimum(i, self.plan.blocks - 1)]
        return jnp.where(exists, wanted, NONE)

    def wanted_units(self, row: Any, i: Any, c: Any) -> Any:
        """Which units of chunk c of block i have a valid slot, as bits."""
        chunks = self.plan.block // self.plan.chunk
        return self.refs["wanted units"][(row * self.plan.blocks + i) * chunks + c]

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
            units = jnp.where(self.wanted(self.row, i) != NONE, units, 0)

        def chunk(c: Any, state: Any) -> Any:
            if not self.plan.masked:
                return self.attend(c, buffer, i, state)
            attend = partial(self.attend, c, buffer, i)
            return jax.lax.cond(self.wanted_units(self.row, i, c) != 0, attend, lambda state: state, state)

        state = jax.lax.fori_loop(0, pl.cdiv(units * self.plan.unit, self.plan.chunk), chunk, state)
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
