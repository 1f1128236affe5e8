"""Functions that the Triton kernels share.

Arrays in Triton have sizes that are powers of two, and products need at least 16 in every axis. A head of 80 or 96
channels is therefore held as tiles of 64 and 16 or 32, so that no padding is read or multiplied. If a head is not a
multiple of 16, its last tile is masked.

Since 0.11 jax emits a DeprecationWarning for this backend each time it lowers a kernel. Python hides it by default, so
it is not filtered here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

_PROGRAMS = 512  # about four for each multiprocessor of an A100 (108) or H100 (132)
_LEAST = 16  # size of an axis of a product
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

Tiles = list[Any]  # one head: arrays [rows, channels of the tile]


def part(x: Any, *picked: int | Callable[..., Any] | None) -> pl.BlockSpec:
    """The block spec of a program's part of an array.

    `picked` is what takes one index of each of the first axes: the grid axis with this number, or a function of the
    indices of all grid axes; None: the program gets the whole axis, like the axes after those.
    """
    picked += (None,) * (x.ndim - len(picked))

    def index(*program: Any) -> tuple[Any, ...]:
        return tuple(0 if p is None else p(*program) if callable(p) else program[p] for p in picked)

    return pl.BlockSpec(tuple(n if p is None else None for n, p in zip(x.shape, picked, strict=True)), index)


def share(count: Any, parts: int, step: int, axis: int) -> tuple[Any, Any, Any]:
    """First entry, end and number of iterations of this program, of `count` entries cut into parts over a grid axis.

    A part has whole iterations of `step` entries. Past the end, the number of iterations is at most 0.
    """
    part = jax.lax.div(count + (parts * step - 1), parts * step) * step
    begin = pl.program_id(axis) * part
    end = jnp.minimum(begin + part, count)
    return begin, end, jax.lax.div(end - begin + (step - 1), step)


def unsupported(*arrays: Any) -> str | None:
    """Returns why a kernel cannot take arrays of these dtypes, or None if it can."""
    for x in arrays:
        if x.dtype not in _DTYPES:
            return f"it takes bfloat16, float16 and float32, not {x.dtype}"
    return None


# Of every kernel: warps (of 32 threads) of a program, and iterations of a loop whose loads run ahead.
PARAMETERS = triton.CompilerParams(num_warps=4, num_stages=3)


def product_sizes(dtype: Any) -> tuple[int, int]:
    """Block sizes for a program that multiplies one fixed block of vectors with a loop over others: fixed, others.

    Each of 4 warps takes a quarter of the fixed block. With 32 vectors per warp, the tensor cores are the limit and not
    the loads. float32 has no tensor cores at full precision and takes twice the memory.
    """
    small = jnp.dtype(dtype).itemsize < 4
    return (128, 64) if small else (32, 32)


def splits(programs: int, steps: int) -> int:
    """Number of parts into which to cut a loop of `steps` iterations that each of `programs` programs would run.

    As many as fill the device, but each part has at least two iterations.
    """
    return max(1, min(-(-_PROGRAMS // programs), steps // 2))


def padded(count: int) -> int:
    """Size of an array that holds `count` rows of a product: the next power of two, at least 16."""
    return max(_LEAST, pl.next_power_of_2(count))


def tiles(head_dim: int) -> list[tuple[int, int]]:
    """First channel and size of each tile of a head. Example: 80 gives (0, 64) and (64, 16)."""
    result, first = [], 0
    while first < head_dim:
        remaining = head_dim - first
        size = max(_LEAST, pl.next_power_of_2(remaining + 1) // 2)
        result.append((first, size))
        first += size
    return result


def load(ref: Any, *places: Array, mask: Array, other: Any = 0) -> Array:
    """`ref[places]` where `mask`, else `other`; masked indices may be out of bounds."""
    return triton.load(ref.at[places], mask=mask, other=other)


def load_rows(ref: Any, rows: Int[Array, " C"], mask: Bool[Array, " C"]) -> Tiles:
    """Loads rows of a reference [.., H] as tiles, with zeros where `mask` is False and past the last channel."""
    result = []
    for first, size in tiles(ref.shape[-1]):
        channel = first + jnp.arange(size)
        inside = mask[:, None]
        if first + size > ref.shape[-1]:
            inside = inside & (channel < ref.shape[-1])[None]
        result.append(load(ref, rows[:, None], channel[None], mask=inside))
    return result


def store_rows(ref: Any, rows: Int[Array, " C"], mask: Bool[Array, " C"], values: Tiles) -> None:
    """Writes tiles to rows of a reference where `mask` is True: the inverse of `load_rows`."""
    for (first, size), x in zip(tiles(ref.shape[-1]), values, strict=True):
        channel = first + jnp.arange(size)
        inside = mask[:, None] & (channel < ref.shape[-1])[None]
        triton.store(ref.at[rows[:, None], channel[None]], x.astype(ref.dtype), mask=inside)


def dot(a: Float[Array, "M C"], b: Float[Array, "C N"]) -> Float[Array, "M N"]:
    """a b, accumulated in float32. float32 inputs keep full precision, others use tensor cores."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


def logits(q: Tiles, k: Tiles, scale: float) -> Float[Array, "M N"]:
    """scale q k^T over all tiles of a head."""
    products = [dot(a, b.T) for a, b in zip(q, k, strict=True)]
    return scale * functools.reduce(jnp.add, products)
