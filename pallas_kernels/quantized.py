"""A quantised pool with 2, 4 or 8 bits per number, as in KIVI: keys share a range per channel, values per token.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv:2402.02750). Some key channels
are large in every token, so groups of keys run along the slots. Values have no such channels, so their groups run along
the channels. Within a group, x = low + code * scale, where code is an integer below 2^bits and low the smallest value
of the group (asymmetric quantisation).

Axes: B batch · P pool slots · K key heads · H head dim · W = H bits / 8, bytes of a head · C slots of a slice.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.cpu import beside

Axis = Literal["slots", "channels"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedPool:
    """A quantised array that replaces a pool [B, K, P, H]; inside `vmap`, one row and head of it, [P, H].

    Ranges have the dtype of the original pool. The smallest value of a group is then exact. Rounding the scale costs
    little, since codes are chosen afterwards: in bfloat16 the top code misses the largest value by 6% of a step.
    """

    codes: UInt8[Array, "*slots"]  # [B, K, P, W], the first channel in the lowest bits
    scale: Float[Array, "*groups"]  # [B, K, ceil(P / group), H] along slots, [B, K, P, ceil(H / group)] along channels
    low: Float[Array, "*groups"]
    bits: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})  # numbers per group; the last group may be smaller
    axis: Axis = dataclasses.field(metadata={"static": True})  # the axis along which groups run

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool that this one replaces."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the dequantised values."""
        return self.scale.dtype

    @property
    def nbytes(self) -> int:
        """Allocated bytes: codes and ranges."""
        return self.codes.nbytes + self.scale.nbytes + self.low.nbytes


def quantize(
    x: Float[Array, "B #K P H"], used: Bool[Array, "B #K P"], *, bits: int = 4, group: int = 32, axis: Axis
) -> QuantizedPool:
    """Quantises each group's used slots to 2^bits equally spaced values between their smallest and largest.

    Args:
        x: the pool.
        used: which slots are used; free slots may hold anything and do not affect the ranges.
        bits: 2, 4 or 8.
        group: how many numbers share a range.
        axis: "slots" (for keys) or "channels" (for values): the axis along which groups run.

    Raises:
        ValueError: an invalid option, or a head that does not fill whole bytes.
    """
    head_dim = x.shape[-1]
    if bits not in (2, 4, 8) or group < 1 or axis not in ("slots", "channels"):
        raise ValueError(f"quantize: bits={bits!r} must be 2, 4 or 8, group={group!r} at least 1, "
                         f'axis={axis!r} "slots" or "channels"')  # fmt: skip
    if head_dim * bits % 8:
        raise ValueError(f"quantize: {head_dim} channels of {bits} bits do not fill whole bytes")
    along = 2 if axis == "slots" else 3
    used = used[..., None]
    low = jnp.min(_split(jnp.where(used, x, jnp.inf), along, group, jnp.inf), axis=along + 1)
    high = jnp.max(_split(jnp.where(used, x, -jnp.inf), along, group, -jnp.inf), axis=along + 1)
    unused = low > high
    low, high = jnp.where(unused, 0, low), jnp.where(unused, 0, high)
    top = 2**bits - 1
    scale = ((high.astype(jnp.float32) - low.astype(jnp.float32)) / top).astype(x.dtype)

    spread = [jnp.repeat(y.astype(jnp.float32), group, axis=along) for y in (low, jnp.where(scale > 0, scale, 1))]
    least, step = (jax.lax.slice_in_dim(y, 0, x.shape[along], axis=along) for y in spread)
    codes = jnp.clip(jnp.round((x.astype(jnp.float32) - least) / step), 0, top).astype(jnp.uint8)
    return QuantizedPool(codes=_pack(codes, bits), scale=scale, low=low, bits=bits, group=group, axis=axis)


def dequantize(pool: Float[Array, "B #K P H"] | QuantizedPool) -> Float[Array, "B #K P H"]:
    """The whole pool as an array; an array is returned as it is."""
    if not isinstance(pool, QuantizedPool):
        return pool
    return jax.vmap(jax.vmap(lambda one: read(one, jnp.int32(0), pool.shape[2])))(pool)


def read(pool: Float[Array, "P H"] | QuantizedPool, first: Int[Array, ""], count: int) -> Float[Array, "C H"]:
    """Slots first <= p < first + count of one head of a pool as an array; `first` need not be the start of a group."""
    if not isinstance(pool, QuantizedPool):
        return jax.lax.dynamic_slice_in_dim(pool, first, count)
    return _slice(jax.tree.map(lambda x: x[None, None], pool), 0, 0, first, count)


def read_block(
    pool: QuantizedPool, row: Int[Array, ""], head: Int[Array, ""], first: Int[Array, ""], count: int
) -> Float[Array, "C H"]:
    """Slots first <= p < first + count of one row and head; slots past the end of the pool read as finite numbers."""
    begin = jnp.clip(first, 0, pool.shape[2] - count)
    return jnp.roll(_slice(pool, row, head, begin, count), begin - first, axis=0)


def read_slots(
    pool: Float[Array, "B #K P H"] | QuantizedPool,
    row: Int[Array, ""],
    head: Int[Array, ""],
    slots: Int[Array, " C"],
) -> Float[Array, "C H"]:
    """The given slots of one row and head, in any order; indices past the end of the pool read the last slot."""
    pool, slots = beside(pool, jnp.clip(slots, 0, pool.shape[2] - 1))
    if not isinstance(pool, QuantizedPool):  # one flat index is a third faster on a CPU than three indices
        rows = (row * pool.shape[1] + head) * pool.shape[2] + slots
        return pool.reshape(-1, pool.shape[3]).at[rows].get(mode="promise_in_bounds")
    group = slots // pool.group if pool.axis == "slots" else slots

    def spread(y: Array) -> Array:
        y = y[row, head, group].astype(jnp.float32)
        return y if pool.axis == "slots" else jnp.repeat(y, pool.group, axis=1)[:, : pool.shape[-1]]

    codes = _unpack(pool.codes[row, head, slots], pool.bits)
    return (spread(pool.low) + codes * spread(pool.scale)).astype(pool.dtype)


def _slice(pool: QuantizedPool, row: Array | int, head: Array | int, first: Array, count: int) -> Array:
    if pool.axis == "slots":
        groups = min(-(-count // pool.group) + 1, pool.scale.shape[2])  # the slice may begin and end within a group
        begin = jnp.minimum(first // pool.group, pool.scale.shape[2] - groups)
        skip = first - begin * pool.group
    else:
        groups, begin, skip = count, first, jnp.int32(0)

    def cut(x: Array, first: Array, count: int) -> Array:
        return jax.lax.dynamic_slice(x, (row, head, first, 0), (1, 1, count, x.shape[3])).reshape(count, -1)

    def spread(y: Array) -> Array:  # repeat is 1.5 to 4 times as fast on a CPU as a gather
        y = jnp.repeat(cut(y, begin, groups).astype(jnp.float32), pool.group, axis=0 if pool.axis == "slots" else 1)
        return jax.lax.dynamic_slice_in_dim(y, skip, count)[:, : pool.shape[-1]]

    codes = _unpack(cut(pool.codes, first, count), pool.bits)
    return (spread(pool.low) + codes * spread(pool.scale)).astype(pool.dtype)


def _split(x: Array, axis: int, group: int, fill: float) -> Array:
    """[.., n, ..] to [.., groups, group, ..]; the last group is padded with `fill`."""
    pad = [(0, -n % group if i == axis else 0) for i, n in enumerate(x.shape)]
    x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :])


def _pack(codes: UInt8[Array, "*B H"], bits: int) -> UInt8[Array, "*B W"]:
    codes = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    return jnp.sum(codes << jnp.arange(0, 8, bits, dtype=jnp.uint8), axis=-1, dtype=jnp.uint8)


def _unpack(codes: UInt8[Array, "*B W"], bits: int) -> UInt8[Array, "*B H"]:
    parts = codes[..., None] >> jnp.arange(0, 8, bits, dtype=jnp.uint8) & jnp.uint8(2**bits - 1)
    return parts.reshape(*codes.shape[:-1], -1)
