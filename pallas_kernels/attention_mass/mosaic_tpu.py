"""The masses for TPU: of keys in two passes, the log-sum-exp of each row and then the sum over rows for each key; of
rows in one pass of flash attention, in which the weights of the keys take the place of values.

A block of logits has shape [keys, rows], so that the values that belong to a row (its index, log-sum-exp and weight)
are one row of lanes and take O(T) memory. If rows are in order, blocks above the diagonal are neither copied nor
computed. The second pass computes q k^T again, which is cheaper than storing it.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · E heads of a block (they share
one key head) · H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.reference import MassArguments, MassRowsArguments, RowArguments
from pallas_kernels.tpu import FLOOR, LANES, MASKED, dot, interpreter

# Largest sizes of a block.
_ROWS = 256
_KEYS = 512
_HEADS = 8
_PARAMETERS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def attention_mass_mosaic_tpu(args: MassArguments, interpret: bool = False) -> Float[Array, "R N S"]:
    """Implements `attention_mass` for TPU. `lse` is not used."""
    return _mass(dataclasses.replace(args, lse=None), _Tiles.of(args), interpret)


# Under jit, so that it is traced once for all layers of a model, which have the same shapes.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _mass(args: MassArguments, tiles: _Tiles, interpret: bool) -> Float[Array, "R N S"]:
    weights, keys = args.row_weight.shape[0], args.k.shape[1]
    arrays = _prepare(tiles, args)
    level = _along_rows(args, arrays, tiles, interpret, peak=args.statistic == "count")
    row_block = tiles.row_block
    mass = pl.pallas_call(
        functools.partial(_columns, tiles=tiles, statistic=args.statistic, threshold=args.threshold),
        grid=(tiles.groups, tiles.key_blocks, tiles.row_blocks),
        in_specs=[
            *tiles.specs(keys_inner=False),
            pl.BlockSpec((1, tiles.heads, tiles.rows), lambda n, j, i: (n, 0, row_block(i, j))),
            pl.BlockSpec((weights, tiles.rows), lambda n, j, i: (0, row_block(i, j))),
        ],
        out_specs=pl.BlockSpec((1, tiles.heads, weights, tiles.keys), lambda n, j, i: (n, 0, 0, j)),
        out_shape=jax.ShapeDtypeStruct((tiles.groups, tiles.heads, weights, arrays[1].shape[1]), jnp.float32),
        compiler_params=_PARAMETERS,
        interpret=interpreter(interpret),
        name="attention_mass",
    )(*arrays, level, _fill_up(args.row_weight.astype(jnp.float32), 1))
    return mass.reshape(args.q.shape[0], weights, -1).swapaxes(0, 1)[..., :keys]


@functools.partial(jax.jit, static_argnames="interpret")
def attention_mass_rows_mosaic_tpu(args: MassRowsArguments, interpret: bool = False) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows` for TPU."""
    tiles, (heads, rows, _), weight = _Tiles.of(args), args.q.shape, args.key_weight
    mass = _along_rows(args, _prepare(tiles, args), tiles, interpret, key_weight=weight)
    return mass.reshape(heads, weight.shape[0], -1).swapaxes(0, 1)[..., :rows]


def _along_rows(
    args: RowArguments,
    arrays: list[Array],
    tiles: _Tiles,
    interpret: bool,
    *,
    key_weight: Any = None,
    peak: bool = False,
) -> Array:
    """Of each row the log-sum-exp, or with `peak` the largest logit; with `key_weight` the weighted sums instead."""
    weights = [] if key_weight is None else [_fill_up(key_weight.astype(jnp.float32), 1)]
    of_head = (tiles.heads, *(x.shape[0] for x in weights), tiles.rows)
    before = (0,) * (len(of_head) - 1)
    options: dict[str, Any] = {"tiles": tiles, "softmax_n": args.softmax_n, "peak": peak, "weighted": bool(weights)}
    return pl.pallas_call(
        functools.partial(_rows, **options),
        grid=(tiles.groups, tiles.row_blocks, tiles.key_blocks),
        in_specs=[
            *tiles.specs(keys_inner=True),
            *(pl.BlockSpec((len(x), tiles.keys), lambda n, i, j: (0, tiles.key_block(i, j))) for x in weights),
        ],
        out_specs=pl.BlockSpec((1, *of_head), lambda n, i, j: (n, *before, i)),
        out_shape=jax.ShapeDtypeStruct((tiles.groups, *of_head[:-1], arrays[0].shape[2]), jnp.float32),
        scratch_shapes=[
            *[pltpu.VMEM((tiles.heads, tiles.rows), jnp.float32)] * 2,
            *(pltpu.VMEM(of_head, jnp.float32) for _ in weights),
        ],
        compiler_params=_PARAMETERS,
        interpret=interpreter(interpret),
        name="attention_mass_rows" if weights else "attention_mass_levels",
    )(*arrays, *weights)


def unsupported(args: MassArguments | MassRowsArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    weight = args.row_weight if isinstance(args, MassArguments) else args.key_weight
    if args.q.dtype != args.k.dtype or args.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries are {args.q.dtype} and keys {args.k.dtype}, not both bfloat16 or both float32"
    if weight.shape[0] > 64:
        return f"{weight.shape[0]} weightings are more than 64"
    return None


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """How heads, rows and keys are cut into blocks."""

    heads: int  # heads of a block
    groups: int  # groups of `heads` heads
    rows: int  # rows of a block
    keys: int  # keys of a block
    row_blocks: int
    key_blocks: int
    per_key_head: int  # groups that share one key head
    head_dim: int
    causal: bool
    in_order: bool

    @classmethod
    def of(cls, args: RowArguments) -> _Tiles:
        (total, rows, head_dim), (kv_heads, keys, _) = args.q.shape, args.k.shape
        group = total // kv_heads
        heads = max(n for n in range(1, _HEADS + 1) if group % n == 0)
        row_block, key_block = _block(rows, _ROWS), _block(keys, _KEYS)
        blocks, ordered = (-(-rows // row_block), -(-keys // key_block)), args.causal and args.in_order
        sizes = heads, total // heads, row_block, key_block, *blocks, group // heads, head_dim
        return cls(*sizes, args.causal, ordered)

    # The blocks to copy at step (i, j). Row blocks that attend to no key of block j are replaced by the first that
    # does, and key blocks that no row of block i attends to by the last that is used, so nothing is copied for them.

    def row_block(self, i: Any, j: Any) -> Any:
        return jnp.maximum(i, j * self.keys // self.rows) if self.in_order else i

    def key_block(self, i: Any, j: Any) -> Any:
        return jnp.minimum(j, ((i + 1) * self.rows - 1) // self.keys) if self.in_order else j

    def specs(self, keys_inner: bool) -> list[pl.BlockSpec]:
        """Block specs of the arrays from `_prepare`.

        The grid is (groups, row blocks, key blocks) if `keys_inner`, else (groups, key blocks, row blocks).
        """

        def spec(shape: tuple[int, ...], index: Any) -> pl.BlockSpec:
            return pl.BlockSpec(shape, index if keys_inner else lambda n, j, i: index(n, i, j))

        row = (lambda i, j: i) if keys_inner else self.row_block
        key = self.key_block if keys_inner else (lambda i, j: j)
        return [
            spec((1, self.heads, self.rows, self.head_dim), lambda n, i, j: (n, 0, row(i, j), 0)),
            spec((1, self.keys, self.head_dim), lambda n, i, j: (n // self.per_key_head, key(i, j), 0)),
            spec((1, self.rows), lambda n, i, j: (0, row(i, j))),
            spec((1, self.keys), lambda n, i, j: (0, key(i, j))),
        ]

    def visit(self, refs: Any, i: Any, j: Any, use: Any) -> None:
        """Calls `use(e, logits, allowed)` for each head e of the block (i, j), unless causality masks the whole block.

        `logits` is [keys, rows]; `allowed` is a mask that broadcasts to it.
        """
        q_ref, k_ref, place_ref, mask_ref = refs
        place = place_ref[...]
        last = (i + 1) * self.rows - 1 if self.in_order else jnp.max(place)

        @pl.when((last >= j * self.keys) if self.causal else True)
        def _() -> None:
            allowed = jnp.broadcast_to(mask_ref[...], (8, self.keys)).T[:, :1] > 0
            if self.causal:
                key = j * self.keys + jax.lax.broadcasted_iota(jnp.int32, (self.keys, 1), 0)
                allowed = allowed & (key <= place)
            for e in range(self.heads):
                use(e, dot(k_ref[0], q_ref[0, e], (1, 1)) * self.head_dim**-0.5, allowed)


def _prepare(tiles: _Tiles, args: RowArguments) -> list[Array]:
    """Queries, keys, row indices and key mask in the shapes that the kernels read, padded to whole lanes."""
    q = _fill_up(args.q, 1)
    return [
        q.reshape(tiles.groups, tiles.heads, *q.shape[1:]),
        _fill_up(args.k, 1),
        _fill_up(args.row_place.astype(jnp.int32)[None], 1),
        _fill_up(args.key_mask.astype(jnp.float32)[None], 1),
    ]


def _fill_up(x: Array, axis: int) -> Array:
    return jnp.pad(x, [(0, -n % LANES if i == axis else 0) for i, n in enumerate(x.shape)])


def _online(logits: Any, allowed: Any, peak: Any, weight: Any) -> tuple[Any, Any, Any, Any]:
    """Adds one block of keys to an online softmax.

    Returns:
        The new largest logit of each row, the new sum of exponentials, the factor by which the old sum was multiplied,
        and the exponentials of the block.
    """
    logits = jnp.where(allowed, logits, MASKED)
    both = jnp.maximum(peak, jnp.max(logits, axis=0, keepdims=True))
    old, exponent = jnp.exp(peak - both), jnp.exp(logits - both)
    return both, weight * old + jnp.sum(exponent, axis=0, keepdims=True), old, exponent


def _log_denominator(peak: Any, weight: Any, softmax_n: float) -> Any:
    """log(softmax_n + sum of exponentials); an arbitrary finite number for a row without keys."""
    lse = peak + jnp.log(jnp.where(weight > 0, weight, 1.0))
    return jnp.logaddexp(lse, math.log(softmax_n)) if softmax_n else lse


def _block(size: int, most: int) -> int:
    """The largest multiple of the lane count, at most `most`, that divides `size` rounded up to whole lanes."""
    size = -(-size // LANES) * LANES
    return max(n for n in range(LANES, most + 1, LANES) if size % n == 0)


def _columns(*refs: Any, tiles: _Tiles, statistic: str, threshold: float) -> None:
    *inputs, level_ref, weight_ref, mass_ref = refs
    j, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def _() -> None:
        mass_ref[...] = jnp.zeros_like(mass_ref)

    def use(e: int, logits: Any, allowed: Any) -> None:
        log_p = logits - level_ref[0, e : e + 1]
        p = jnp.exp(log_p)
        if statistic == "count":
            p = (p >= threshold).astype(jnp.float32)
        elif statistic == "square":
            p = p * p
        elif statistic == "entropy":
            p = -p * log_p
        mass_ref[0, e] += _weigh(weight_ref[...], jnp.where(allowed, p, 0.0), inputs[0].dtype, (1, 1))

    tiles.visit(inputs, i, j, use)


def _rows(*refs: Any, tiles: _Tiles, softmax_n: float, peak: bool, weighted: bool) -> None:
    inputs = refs[:4]
    weight_ref, out_ref, peak_ref, sum_ref, total_ref = refs[4:] if weighted else (None, *refs[4:], None)
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _() -> None:
        peak_ref[...] = jnp.full_like(peak_ref, FLOOR)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        if weighted:
            total_ref[...] = jnp.zeros_like(total_ref)

    def use(e: int, logits: Any, allowed: Any) -> None:
        row = slice(e, e + 1)
        peak_ref[row], sum_ref[row], old, exponent = _online(logits, allowed, peak_ref[row], sum_ref[row])
        if weighted:
            total_ref[e] = total_ref[e] * old + _weigh(weight_ref[...], exponent, inputs[0].dtype, (1, 0))

    tiles.visit(inputs, i, j, use)

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        level = peak_ref[...] if peak else _log_denominator(peak_ref[...], sum_ref[...], softmax_n)
        if not weighted:
            out_ref[0] = level
            return
        share = jnp.exp(peak_ref[...] - level)
        for e in range(tiles.heads):
            out_ref[0, e] = total_ref[e] * share[e : e + 1]


def _weigh(weight: Any, p: Any, dtype: Any, contract: tuple[int, int]) -> Any:
    """Weights times probabilities, with the weights at float32 accuracy.

    If queries and keys are float32 (`dtype`), so is the product. Otherwise p is rounded to `dtype`, and the weight is
    split into two numbers of `dtype`, so that it is not rounded.
    """
    if dtype == jnp.float32:
        return dot(weight, p, contract)
    p, high = p.astype(dtype), weight.astype(dtype)
    low = (weight - high.astype(jnp.float32)).astype(dtype)
    return dot(high, p, contract) + dot(low, p, contract)
