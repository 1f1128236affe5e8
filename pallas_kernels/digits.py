"""A quantised pool in which every value vector and every channel of the keys has its own number of bits.

All codes are made of digits of 2 bits, so that numbers with different bits fill the same bytes: x = low + scale
sum_j 4^j digit_j. A line is what shares a range and a number of digits: the value vector of an entry, or a channel of
the keys of one segment. All segments of the pool have equally many slots and bytes, so no table says where they are.

A byte has one digit of 4 consecutive numbers of a line, the first in the lowest bits. The digits of the lines follow
one another. Digit r of all is, for numbers 4 i to 4 i + 3, in byte r H / 4 + i of the values, and in byte i R + r of
the keys, where R is the number of digits of all channels.

Axes: B batch · K key heads · L segments of a head · P pool slots · C slots of a segment · H head dim · U lines of a
segment (H of keys, C of values) · X bytes of a segment · N numbers of a line.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

MOST = 8  # digits of a number: 16 bits


class Ranges:
    """What all quantised pools have: a scale, whose dtype is that of the dequantised values."""

    scale: Any

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dequantised values."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Allocated bytes: codes, ranges and what else is stored."""
        return sum(x.nbytes for x in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitPool(Ranges):
    """A quantised array that replaces a pool [B, K, P, H], in which segment l begins at slot l C."""

    codes: UInt8[Array, "B K L X"]
    digits: UInt8[Array, "B K L U"]  # of the numbers of each line; 0: all of them are 0
    scale: Float[Array, "B K L U"]
    low: Float[Array, "B K L U"]
    slots: int = dataclasses.field(metadata={"static": True})  # P, at least L C
    segment: int = dataclasses.field(metadata={"static": True})  # C
    channels: int = dataclasses.field(metadata={"static": True})  # H
    axis: Literal["slots", "channels"] = dataclasses.field(metadata={"static": True})  # along which lines run

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool that this one replaces."""
        return (*self.codes.shape[:2], self.slots, self.channels)


def quantize_digits(
    x: Float[Array, "B K L C H"],
    used: Bool[Array, "B K L C"],
    digits: UInt8[Array, "B K L U"],
    *,
    axis: Literal["slots", "channels"],
    size: int,
    slots: int,
) -> DigitPool:
    """Quantises each line to 4^digits equally spaced values between the smallest and the largest of its used slots.

    Args:
        x: the segments of the pool. C and H are multiples of 4.
        used: which slots are used; lines without one get no digits.
        digits: 0, 1, 2, 4 or 8 for each line. The digits of a segment must fit in its bytes.
        axis: "slots": a line is a channel (for keys); "channels": a line is a vector (for values).
        size: X; for values a multiple of H / 4.
        slots: P.
    """

    encode = jax.vmap(jax.vmap(partial(_encode, axis=axis, size=size)))
    by_layer = tuple(jnp.moveaxis(y, 2, 0) for y in (x, used, digits))
    encoded = jax.lax.map(lambda layer: encode(*layer), by_layer)  # a loop needs the buffers of one layer only
    names = "codes", "digits", "scale", "low"
    arrays = {name: jnp.moveaxis(y, 0, 2) for name, y in zip(names, encoded, strict=True)}
    return DigitPool(**arrays, slots=slots, segment=x.shape[3], channels=x.shape[4], axis=axis)


def _encode(
    x: Float[Array, "C H"], used: Bool[Array, " C"], digits: UInt8[Array, " U"], *, axis: str, size: int
) -> tuple[Array, Array, Array, Array]:
    """Codes, digits, scales and minima of one segment."""
    kind = x.dtype
    x, inside = (x.T, used[None]) if axis == "slots" else (x, used[:, None])
    low, high = jnp.min(jnp.where(inside, x, jnp.inf), axis=1), jnp.max(jnp.where(inside, x, -jnp.inf), axis=1)
    digits = jnp.where(low <= high, digits, 0)
    low, high = (jnp.where(digits > 0, y, 0).astype(jnp.float32) for y in (low, high))
    top = 4.0 ** digits.astype(jnp.float32) - 1
    # Rounded up, because a scale that is too small by its last bit misses the largest value by 2^8 steps of 2^16.
    scale = ((high - low) / jnp.maximum(top, 1) * (1 + jnp.finfo(kind).eps)).astype(kind)
    step = jnp.where(scale > 0, scale, 1).astype(jnp.float32)[:, None]
    codes = jnp.clip(jnp.round((x.astype(jnp.float32) - low[:, None]) / step), 0, top[:, None]).astype(jnp.uint16)

    ends, byte = jnp.cumsum(digits, dtype=jnp.int32), jnp.arange(size)
    most, fours = jnp.maximum(ends[-1], 1), codes.shape[1] // 4
    number, four = (byte % most, byte // most) if axis == "slots" else (byte // fours, byte % fours)
    lines, most_numbers = jnp.arange(len(ends)), min(size, MOST * len(ends))
    line = jnp.repeat(lines, digits.astype(jnp.int32), total_repeat_length=most_numbers)[number]
    shift = 2 * (number - (ends - digits)[line])
    of_byte = codes.reshape(-1, fours, 4)[line, jnp.minimum(four, fours - 1)].astype(jnp.int32) >> shift[:, None] & 3
    packed = jnp.sum(of_byte << 2 * jnp.arange(4), axis=1)
    packed = jnp.where((number < ends[-1]) & (four < fours), packed, 0)
    return packed.astype(jnp.uint8), digits, scale, low.astype(kind)


@jax.jit
def dequantize_digits(pool: DigitPool) -> Float[Array, "B K P H"]:
    """The whole pool as an array."""
    batch, heads, layers, _ = pool.codes.shape

    def segment(row: Int[Array, ""], head: Int[Array, ""], layer: Int[Array, ""]) -> Float[Array, "C H"]:
        return read_digits(pool, row, head, layer * pool.segment, pool.segment)

    rows, columns, numbers = jnp.meshgrid(jnp.arange(batch), jnp.arange(heads), jnp.arange(layers), indexing="ij")
    x = jax.vmap(jax.vmap(jax.vmap(segment)))(rows, columns, numbers).reshape(batch, heads, -1, pool.channels)
    return jnp.pad(x, [(0, 0), (0, 0), (0, pool.slots - x.shape[2]), (0, 0)])


def read_digits(
    pool: DigitPool, row: Int[Array, ""], head: Int[Array, ""], first: Int[Array, ""], count: int
) -> Float[Array, "N H"]:
    """Slots first <= p < first + count of one row and head; those past the end of the segment are finite numbers."""
    layer = jnp.clip(first // pool.segment, 0, pool.codes.shape[2] - 1)
    place = first - layer * pool.segment
    where = row, head, layer
    counts, scale, low = (x[where] for x in (pool.digits, pool.scale, pool.low))
    counts, place_of_digit, place_in_byte = counts.astype(jnp.int32), jnp.arange(MOST), 2 * jnp.arange(4)
    if pool.axis == "slots":
        four = place // 4 + jnp.arange((count + 6) // 4)
        number = (jnp.cumsum(counts) - counts)[:, None] + place_of_digit  # [H, digits]
        packed = pool.codes.at[(*where, four[:, None, None] * jnp.sum(counts) + number)].get(mode="clip")
        read = packed[:, None].astype(jnp.int32) >> place_in_byte[:, None, None] & 3  # [fours, 4, H, digits]
        read = jnp.where(place_of_digit < counts[:, None], read << 2 * place_of_digit, 0)
        codes = jnp.sum(read, axis=-1).reshape(-1, pool.channels)
        codes = jax.lax.dynamic_slice_in_dim(codes, place % 4, count)
    else:
        before = jnp.sum(jnp.where(jnp.arange(pool.segment) < place, counts, 0))
        places = place + jnp.arange(count)
        counts, scale, low = (x.at[places].get(mode="fill", fill_value=0) for x in (counts, scale, low))
        number = (before + jnp.cumsum(counts) - counts)[:, None] + place_of_digit  # [N, digits]
        by_number = pool.codes.reshape(*pool.codes.shape[:3], -1, pool.channels // 4)
        packed = by_number.at[(*where, number)].get(mode="clip")
        read = packed[..., None].astype(jnp.int32) >> place_in_byte & 3  # [N, digits, H / 4, 4]
        shifted = read.reshape(count, MOST, -1) << 2 * place_of_digit[:, None]
        read = jnp.where(place_of_digit[:, None] < counts[:, None, None], shifted, 0)
        codes, scale, low = jnp.sum(read, axis=1), scale[:, None], low[:, None]
    return (low.astype(jnp.float32) + codes * scale.astype(jnp.float32)).astype(pool.dtype)
