"""Sizes of the blocks, chunks and copies of decode_attention for TPU.

Axes: B batch · K key heads · P pool slots · H head dim.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.decode_attention.reference import DecodeArguments
from pallas_kernels.tpu import LANES, last_axis_is_slots

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
