"""What the Triton kernels share: the call, tiles of a head, a product, the number of programs, and the merge of parts.

Triton's arrays have sizes that are powers of two, and its products want at least 16 in every axis. A head of 80 or 96
channels is therefore held as tiles of 64 and 16 or 32, which reads and multiplies nothing but the head; one that is no
multiple of 16 ends in a tile that is masked.

jax calls the backend deprecated since 0.11, each time that it lowers a kernel. Python hides that DeprecationWarning
unless it is asked to show it, so nothing is filtered here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

_PROGRAMS = 512  # four for each core of an A100 (108) or H100 (132)
_LEAST = 16  # of an axis of a product
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

Tiles = list[Any]  # of one head: arrays [rows, channels of the tile]


def pallas_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    out_shape: Sequence[Any],
    name: str,
    warps: int,
    stages: int,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
) -> Callable[..., Any]:
    """`pl.pallas_call` of the Triton backend, which no default chooses.

    Args:
        kernel: of references, inputs first.
        grid: programs; the first axis runs fastest.
        in_specs: of the inputs; None: the whole array.
        out_specs: of the outputs.
        out_shape: shapes and dtypes of the outputs.
        name: in profiles.
        warps: of 32 threads, for one program.
        stages: how many turns of a loop are being fetched while one is computed.
        aliases: which input an output overwrites.
        interpret: run in the interpreter, on any host.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
        interpret=interpret,
    )


def unsupported(*arrays: Any) -> str | None:
    """Why a kernel cannot take arrays of these dtypes; None: it can."""
    for x in arrays:
        if x.dtype not in _DTYPES:
            return f"it takes bfloat16, float16 and float32, not {x.dtype}"
    return None


def product_sizes(dtype: Any) -> dict[str, int]:
    """Safe sizes for a program that multiplies one block of vectors, which stays, with block after block that pass.

    Each of 4 warps takes a quarter of those that stay; with 32 of them to a warp, the tensor cores and not the reading
    of what passes set the pace. float32 has no tensor cores at full precision, and half the room.
    """
    small = jnp.dtype(dtype).itemsize < 4
    return {"stay": 128 if small else 32, "pass": 64 if small else 32, "warps": 4, "stages": 3}


def splits(programs: int, steps: int) -> int:
    """Into how many parts to cut a loop of `steps` turns, of which `programs` programs run one each.

    As many as fill the device, but no part shorter than two turns.
    """
    return max(1, min(-(-_PROGRAMS // programs), steps // 2))


def padded(count: int) -> int:
    """The size of an array for `count` rows that take part in a product: a power of two, at least 16."""
    return max(_LEAST, pl.next_power_of_2(count))


def tiles(head_dim: int) -> list[tuple[int, int]]:
    """First channel and size of each tile of a head: 80 as (0, 64) and (64, 16)."""
    result, first = [], 0
    while first < head_dim:
        left = head_dim - first
        size = max(_LEAST, pl.next_power_of_2(left + 1) // 2)
        result.append((first, size))
        first += size
    return result


def load(ref: Any, *places: Array, mask: Array, other: Any = 0) -> Array:
    """`ref[places]`, and `other` where not `mask`; places there may lie outside."""
    return triton.load(ref.at[places], mask=mask, other=other)


def load_rows(ref: Any, rows: Int[Array, " C"], mask: Bool[Array, " C"]) -> Tiles:
    """Rows of a reference [.., H] as tiles; zeros where not `mask` and past the last channel."""
    result = []
    for first, size in tiles(ref.shape[-1]):
        channel = first + jnp.arange(size)
        inside = mask[:, None]
        if first + size > ref.shape[-1]:
            inside = inside & (channel < ref.shape[-1])[None]
        result.append(load(ref, rows[:, None], channel[None], mask=inside))
    return result


def store_rows(ref: Any, rows: Int[Array, " C"], mask: Bool[Array, " C"], values: Tiles) -> None:
    """The inverse of `load_rows`."""
    for (first, size), x in zip(tiles(ref.shape[-1]), values, strict=True):
        channel = first + jnp.arange(size)
        inside = mask[:, None] & (channel < ref.shape[-1])[None]
        triton.store(ref.at[rows[:, None], channel[None]], x.astype(ref.dtype), mask=inside)


def dot(a: Float[Array, "M C"], b: Float[Array, "C N"]) -> Float[Array, "M N"]:
    """a b, summed in float32; of float32 arrays to full precision, of others on tensor cores."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


def logits(q: Tiles, k: Tiles, scale: float) -> Float[Array, "M N"]:
    """scale q k^T over all tiles of a head."""
    products = [dot(a, b.T) for a, b in zip(q, k, strict=True)]
    return scale * functools.reduce(jnp.add, products)


def total(lse: Float[Array, "Z ..."]) -> Array:
    """The log of the denominator of all Z parts from the log of each part's."""
    return jax.nn.logsumexp(lse, axis=0)


def merge(parts: Float[Array, "Z ..."], lse: Float[Array, "Z ..."]) -> Array:
    """Means under a softmax over all Z parts from the mean over each; zero if all of them are empty."""
    denominator = total(lse)
    share = jnp.exp(lse - jnp.where(jnp.isfinite(denominator), denominator, 0.0)[None])
    return jnp.sum(parts * share, axis=0)
