"""A quantised pool with a few bits per number, as in KIVI or as in TurboQuant.

Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (arXiv:2402.02750): keys share a range
per channel, values per token. Some key channels are large in every token, so groups of keys run along the slots. Values
have no such channels, so their groups run along the channels. Within a group, x = low + code * scale, where code is an
integer below 2^bits and low the smallest value of the group (asymmetric quantisation).

Zandieh et al. 2025, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate" (arXiv:2504.19874): a
vector of a head is rotated by a fixed random rotation, after which its channels are nearly Gaussian. Each channel gets
the code of the nearest level of the best codebook for a Gaussian; the vector's norm is stored too. Readers get rotated
vectors, so attention rotates queries once (`to_basis`) and the result back (`from_basis`).

Axes: B batch · P pool slots · K key heads · H head dim · W = H bits / 8, bytes of a head · C slots of a slice.
"""

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels.cpu import beside
from pallas_kernels.digits import DigitPool, Ranges, dequantize_digits, read_digits

Axis = Literal["slots", "channels"]
_EXACT = jax.lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedPool(Ranges):
    """A quantised array that replaces a pool [B, K, P, H]; inside `vmap`, one row and head of it, [P, H].

    Ranges have the dtype of the original pool. The smallest value of a group is then exact. Rounding the scale costs
    little, since codes are chosen afterwards: in bfloat16 the top code misses the largest value by 6% of a step.
    """

    codes: UInt8[Array, "*slots"]  # [B, K, P, W], the first channel in the lowest bits
    scale: Float[Array, "*groups"]  # [B, K, ceil(P / group), H] along slots, [B, K, P, ceil(H / group)] along channels
    low: Float[Array, "*groups"] | None  # None: TurboQuant; a group is a whole vector, with the scale norm / sqrt(H)
    bits: int = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})  # numbers per group; the last group may be smaller
    axis: Axis = dataclasses.field(metadata={"static": True})  # the axis along which groups run

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool that this one replaces."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 8 // self.bits)


Quantized = QuantizedPool | DigitPool  # every pool that is not an array


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
        options = f'bits={bits!r} must be 2, 4 or 8, group={group!r} at least 1, axis={axis!r} "slots" or "channels"'
        raise ValueError(f"quantize: {options}")
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
    return QuantizedPool(codes=_regroup(codes, bits, 8), scale=scale, low=low, bits=bits, group=group, axis=axis)


def quantize_rotated(x: Float[Array, "B #K P H"], used: Bool[Array, "B #K P"], *, bits: int = 4) -> QuantizedPool:
    """Quantises every vector by itself, as in TurboQuant (its Alg. 1).

    Args:
        x: the pool.
        used: which slots are used; the others become 0.
        bits: 2, 3 or 4.

    Raises:
        ValueError: other bits, or a head that does not fill whole bytes.
    """
    head_dim = x.shape[-1]
    if bits not in (2, 3, 4) or head_dim * bits % math.lcm(bits, 8):
        raise ValueError(f"quantize_rotated: bits={bits!r} must be 2, 3 or 4, and {head_dim} channels fill whole bytes")
    vectors = jnp.where(used[..., None], x.astype(jnp.float32), 0.0)
    scale = jnp.linalg.norm(vectors, axis=-1, keepdims=True) * head_dim**-0.5
    unit = rotate(vectors) / jnp.where(scale > 0, scale, 1.0)
    codes = jnp.sum(unit[..., None] > jnp.array(_between(codebook(bits))), axis=-1, dtype=jnp.uint8)
    codes, scale = _regroup(codes, bits, 8), scale.astype(x.dtype)
    return QuantizedPool(codes=codes, scale=scale, low=None, bits=bits, group=head_dim, axis="channels")


@functools.cache
def codebook(bits: int) -> tuple[float, ...]:
    """The 2^bits levels with the least mean squared error for a standard Gaussian, by Lloyd's iteration."""
    levels = [-2 + 4 * i / (2**bits - 1) for i in range(2**bits)]
    for _ in range(2000):
        ends = [-math.inf, *_between(levels), math.inf]
        below = [(1 + math.erf(end / math.sqrt(2))) / 2 for end in ends]
        density = [math.exp(-(end**2) / 2) / math.sqrt(2 * math.pi) for end in ends]
        # The mean of the numbers that are nearest to each level.
        levels = [(density[i] - density[i + 1]) / (below[i + 1] - below[i]) for i in range(len(levels))]
    return tuple(levels)


def _between(levels: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in itertools.pairwise(levels)]


@functools.cache
def _signs(head_dim: int) -> tuple[tuple[float, ...], ...]:
    """Random signs of the channels for each round, always the same for a head dim."""
    draw = random.Random(head_dim)  # whose `random` gives the same numbers in all versions of Python
    return tuple(tuple(1.0 if draw.random() < 0.5 else -1.0 for _ in range(head_dim)) for _ in range(2))


def _cosines(head_dim: int) -> Float[Array, "H H"]:
    """The orthonormal discrete cosine transform."""
    i = jnp.arange(head_dim)
    angle = i[:, None] * (2 * i + 1) % (4 * head_dim) * (math.pi / (2 * head_dim))
    return jnp.cos(angle) * jnp.where(i[:, None] > 0, math.sqrt(2 / head_dim), math.sqrt(1 / head_dim))


def rotate(x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    """A random rotation in float32: two rounds of random signs and a cosine transform. No cache needs to store it."""
    cosines = _cosines(x.shape[-1])
    for signs in _signs(x.shape[-1]):
        x = jnp.einsum("...h,ih->...i", x.astype(jnp.float32) * jnp.array(signs), cosines, precision=_EXACT)
    return x


def _rotate_back(x: Float[Array, "*n H"]) -> Float[Array, "*n H"]:
    cosines = _cosines(x.shape[-1])
    for signs in reversed(_signs(x.shape[-1])):
        x = jnp.einsum("...h,hi->...i", x.astype(jnp.float32), cosines, precision=_EXACT) * jnp.array(signs)
    return x


def to_basis(q: Float[Array, "*n H"], pool: Array | Quantized) -> Float[Array, "*n H"]:
    """Queries for keys as `read_block` and `read_slots` return them."""
    return rotate(q).astype(q.dtype) if isinstance(pool, QuantizedPool) and pool.low is None else q


def from_basis(out: Float[Array, "*n H"], pool: Array | Quantized) -> Float[Array, "*n H"]:
    """Sums of values as `read_block` and `read_slots` return them, rotated back."""
    return _rotate_back(out).astype(out.dtype) if isinstance(pool, QuantizedPool) and pool.low is None else out


def dequantize(pool: Float[Array, "B #K P H"] | Quantized) -> Float[Array, "B #K P H"]:
    """The whole pool as an array; an array is returned as it is."""
    if isinstance(pool, DigitPool):
        return dequantize_digits(pool)
    if not isinstance(pool, QuantizedPool):
        return pool

    def of_head(head: QuantizedPool) -> Float[Array, "P H"]:
        return _slice(jax.tree.map(lambda x: x[None, None], head), 0, 0, jnp.int32(0), pool.shape[2])

    return from_basis(jax.vmap(jax.vmap(of_head))(pool), pool)


def read_block(
    pool: Quantized, row: Int[Array, ""], head: Int[Array, ""], first: Int[Array, ""], count: int
) -> Float[Array, "C H"]:
    """Slots first <= p < first + count of one row and head; slots past the end of the pool read as finite numbers.

    Vectors of TurboQuant stay rotated, here and in the next function.
    """
    if isinstance(pool, DigitPool):
        return read_digits(pool, row, head, first, count)
    begin = jnp.clip(first, 0, pool.shape[2] - count)
    return jnp.roll(_slice(pool, row, head, begin, count), begin - first, axis=0)


def read_slots(
    pool: Float[Array, "B #K P H"] | Quantized,
    row: Int[Array, ""],
    head: Int[Array, ""],
    slots: Int[Array, " C"],
) -> Float[Array, "C H"]:
    """The given slots of one row and head, in any order; indices past the end of the pool read the last slot."""
    pool, slots = beside(pool, jnp.clip(slots, 0, pool.shape[2] - 1))
    if isinstance(pool, DigitPool):
        return jax.vmap(lambda slot: read_digits(pool, row, head, slot, 1)[0])(slots)
    if not isinstance(pool, QuantizedPool):  # one flat index is a third faster on a CPU than three indices
        rows = (row * pool.shape[1] + head) * pool.shape[2] + slots
        return pool.reshape(-1, pool.shape[3]).at[rows].get(mode="promise_in_bounds")
    group = slots // pool.group if pool.axis == "slots" else slots

    def spread(y: Array) -> Array:
        y = y[row, head, group].astype(jnp.float32)
        return y if pool.axis == "slots" else jnp.repeat(y, pool.group, axis=1)[:, : pool.shape[-1]]

    return _values(pool, pool.codes[row, head, slots], spread)


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

    return _values(pool, cut(pool.codes, first, count), spread)


def _values(pool: QuantizedPool, codes: UInt8[Array, "C W"], spread: Callable[[Array], Array]) -> Float[Array, "C H"]:
    """The numbers of some slots; `spread` selects and repeats the numbers of their groups."""
    unpacked = _regroup(codes, 8, pool.bits)
    if pool.low is None:
        levels = jnp.array(codebook(pool.bits)).at[unpacked].get(mode="promise_in_bounds")
        return (levels * spread(pool.scale)).astype(pool.dtype)
    return (spread(pool.low) + unpacked * spread(pool.scale)).astype(pool.dtype)


def _split(x: Array, axis: int, group: int, fill: float) -> Array:
    """[.., n, ..] to [.., groups, group, ..]; the last group is padded with `fill`."""
    pad = [(0, -n % group if i == axis else 0) for i, n in enumerate(x.shape)]
    x = jnp.pad(x, pad, constant_values=fill)
    return x.reshape(*x.shape[:axis], -1, group, *x.shape[axis + 1 :])


def _regroup(x: UInt8[Array, "*B n"], old: int, new: int) -> UInt8[Array, "*B m"]:
    """Reads numbers of `old` bits as numbers of `new` bits, the lowest bits first."""
    word = math.lcm(old, new)
    kind: Any = jnp.uint8 if word == 8 else jnp.uint32
    words = x.reshape(*x.shape[:-1], -1, word // old).astype(kind) << jnp.arange(0, word, old, dtype=kind)
    words = jnp.sum(words, axis=-1, keepdims=True, dtype=kind)
    parts = words >> jnp.arange(0, word, new, dtype=kind) & kind(2**new - 1)
    return parts.reshape(*x.shape[:-1], -1).astype(jnp.uint8)
