"""The masses in Triton, for A100 and H100.

Of rows: flash attention with the key weights in place of values. A program computes a block of rows of one head. If
there are few rows (gathered ones), the keys are cut into parts, which are merged by their log-sum-exps. The last rows
come first, because under causality they have the most work.

Of keys: the log-sum-exp of each row by the same kernel, unless it is given, then the sum over rows for each key. In
the last pass, a program owns a block of keys of one head and loops over all rows that may attend to them. So there are
no atomic additions, and results are bitwise reproducible.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim · Z parts · I rows of a
program or iteration · J keys of an iteration or program.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from pallas_kernels import gpu
from pallas_kernels.attention_mass.reference import MassArguments, MassRowsArguments, RowArguments
from pallas_kernels.denominator import add_constant, join


def unsupported(args: RowArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    return gpu.unsupported(args.q, args.k)


def attention_mass_rows_triton(args: MassRowsArguments, *, interpret: bool = False) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows`. The kernel finds the largest row index of each block without `in_order`."""
    mass, lse, _ = _softmax_rows(args, args.key_weight.astype(jnp.float32), interpret=interpret)
    return mass * jnp.exp(lse - add_constant(lse, args.softmax_n)) if args.softmax_n else mass


def attention_mass_triton(args: MassArguments, *, interpret: bool = False) -> Float[Array, "R N S"]:
    """Implements `attention_mass`."""
    k, row_weight, lse = args.k, args.row_weight, args.lse
    if lse is None or args.statistic == "count":
        _, lse, peak = _softmax_rows(args, None, interpret=interpret)
    if args.statistic == "count":
        level = peak + (math.log(args.threshold) if args.threshold > 0 else -math.inf)  # the smallest logit that counts
    else:
        level = add_constant(lse, args.softmax_n)
    inputs = _Inputs(args.q, k, row_weight.astype(jnp.float32), args.key_mask, args.row_place, level)
    # Here a program keeps its keys and loops over rows; in the other pass it is the reverse, so the sizes are swapped.
    keys, rows = gpu.product_sizes(k.dtype)
    mass = jax.ShapeDtypeStruct((row_weight.shape[0], args.q.shape[0], k.shape[1]), jnp.float32)
    return pl.pallas_call(
        functools.partial(_keys_kernel, args=args, rows=min(rows, gpu.padded(args.q.shape[1])), keys=keys),
        grid=(-(-k.shape[1] // keys), args.q.shape[0]),
        in_specs=(inputs.specs(),),
        out_specs=gpu.part(mass, None, 1),
        out_shape=mass,
        compiler_params=gpu.PARAMETERS,
        name="attention_mass",
        interpret=interpret,
    )(inputs)


class _Inputs(NamedTuple):
    """What both kernels read; in comments the part of one program."""

    q: Any  # [T, H]
    k: Any  # [S, H]
    weight: Any  # [R, S], or of keys [R, T]; or None
    mask: Any  # [S]
    place: Any  # [T]
    level: Any = None  # of keys [T]: log-sum-exp; for "count", the smallest logit that counts

    def specs(self) -> _Inputs:
        """The block specs for a grid (block, head, ...)."""
        group = self.q.shape[0] // self.k.shape[0]
        parts = jax.tree.map(gpu.part, self)
        level = None if self.level is None else gpu.part(self.level, 1)
        return parts._replace(
            q=gpu.part(self.q, 1), k=gpu.part(self.k, lambda block, head, *_: head // group), level=level
        )


class _Outputs(NamedTuple):
    sums: Any  # [R, T]; or None
    lse: Any  # [T]
    peak: Any  # [T]


def _softmax_rows(
    args: RowArguments, key_weight: Float[Array, "R S"] | None, *, interpret: bool = False
) -> tuple[Float[Array, "R N T"], Float[Array, "N T"], Float[Array, "N T"]]:
    """Weighted sums of each row's softmax, the log-sum-exp of its logits, and its largest logit.

    A row without any allowed key has sums of 0, and -inf for the other two. Without `key_weight` R is 0.
    """
    (heads, count, _), slots = args.q.shape, args.k.shape[1]
    rows, keys = gpu.product_sizes(args.k.dtype)
    rows = min(rows, gpu.padded(count))
    blocks = -(-count // rows)
    parts = gpu.splits(heads * blocks, -(-slots // keys))
    weighted = key_weight is not None and key_weight.shape[0] > 0
    inputs = _Inputs(args.q, args.k, key_weight if weighted else None, args.key_mask, args.row_place)
    row = jax.ShapeDtypeStruct((parts, heads, count), jnp.float32)
    of_row = gpu.part(row, 2, 1)
    sums, of_sums = None, None
    if key_weight is not None and weighted:
        sums = jax.ShapeDtypeStruct((parts, key_weight.shape[0], heads, count), jnp.float32)
        of_sums = gpu.part(sums, 2, None, 1)
    sums, lse, peak = pl.pallas_call(
        lambda inputs, *outputs: _rows_kernel(inputs, _Outputs(*outputs), args.causal, rows, keys, parts),
        grid=(blocks, heads, parts),
        in_specs=(inputs.specs(),),
        out_specs=_Outputs(of_sums, of_row, of_row),
        out_shape=_Outputs(sums, row, row),
        compiler_params=gpu.PARAMETERS,
        name="attention_mass_rows" if weighted else "attention_mass_log_sum_exp",
        interpret=interpret,
    )(inputs)
    mass, lse = join(jnp.zeros((parts, 0, heads, count)) if sums is None else sums, lse, axis=1)
    return mass, lse, jnp.max(peak, axis=0)


def _rows_kernel(inputs: _Inputs, outputs: _Outputs, causal: bool, rows: int, keys: int, parts: int) -> None:
    """Works in base 2, because the hardware has an instruction for powers of two."""
    (count, head_dim), slots = inputs.q.shape, inputs.k.shape[0]
    last = -(-count // rows) - 1
    row = (last - pl.program_id(0)) * rows + jnp.arange(rows)
    exists = row < count
    q = gpu.load_rows(inputs.q, row, exists)
    place = gpu.load(inputs.place, row, mask=exists, other=-1)
    visible = jnp.minimum(jnp.max(place) + 1, slots) if causal else jnp.int32(slots)
    begin, end, turns = gpu.share(visible, parts, keys, axis=2)

    def step(i: Any, state: Any) -> Any:
        sums, peak, total = state
        key = begin + i * keys + jnp.arange(keys)
        inside = key < end
        k = gpu.load_rows(inputs.k, key, inside)
        allowed = gpu.load(inputs.mask, key, mask=inside, other=False)[None]
        if causal:
            allowed = allowed & (key[None] <= place[:, None])
        logits = gpu.logits(q, k, head_dim**-0.5 * math.log2(math.e))
        logits = jnp.where(allowed, logits, -jnp.inf)  # [I, J]
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=1))
        shift = jnp.where(new_peak > -jnp.inf, new_peak, 0.0)
        p = jnp.exp2(logits - shift[:, None])
        rescale = jnp.exp2(peak - shift)
        sums = [a * rescale + _weighted_sum(p, inputs.weight, r, key, inside) for r, a in enumerate(sums)]
        return sums, new_peak, total * rescale + jnp.sum(p, axis=1)

    zero = jnp.zeros((rows,), jnp.float32)
    lines = 0 if inputs.weight is None else inputs.weight.shape[0]
    state = ([zero] * lines, jnp.full((rows,), -jnp.inf, jnp.float32), zero)
    sums, peak, total = jax.lax.fori_loop(0, turns, step, state)
    filled = total > 0
    total = jnp.where(filled, total, 1.0)
    for r, a in enumerate(sums):
        triton.store(outputs.sums.at[jnp.full_like(row, r), row], a / total, mask=exists)
    lse = jnp.where(filled, (peak + jnp.log2(total)) * math.log(2), -jnp.inf)
    triton.store(outputs.lse.at[row], lse, mask=exists)
    triton.store(outputs.peak.at[row], peak * math.log(2), mask=exists)


def _keys_kernel(
    inputs: _Inputs, mass_ref: Any, *, args: MassArguments, rows: int, keys: int
) -> None:  # mass_ref: [R, S]
    (count, head_dim), slots, statistic = inputs.q.shape, inputs.k.shape[0], args.statistic
    key = pl.program_id(0) * keys + jnp.arange(keys)
    in_range = key < slots
    k = gpu.load_rows(inputs.k, key, in_range)
    exists = gpu.load(inputs.mask, key, mask=in_range, other=False)[:, None]
    ordered = args.causal and args.in_order
    first = jax.lax.div(pl.program_id(0) * keys, rows) if ordered else jnp.int32(0)

    def step(i: Any, sums: Any) -> Any:  # the product is transposed, [J, I]: the sum over rows stays within a warp
        row = i * rows + jnp.arange(rows)
        inside = row < count
        q = gpu.load_rows(inputs.q, row, inside)
        allowed = exists & inside[None]
        if args.causal:
            allowed = allowed & (key[:, None] <= gpu.load(inputs.place, row, mask=inside, other=-1)[None])
        logits = gpu.logits(k, q, head_dim**-0.5 * math.log2(math.e))
        level = gpu.load(inputs.level, row, mask=inside)[None] * math.log2(math.e)
        if statistic == "count":
            p = (allowed & (logits >= level)).astype(jnp.float32)
        else:
            p = jnp.where(allowed, jnp.exp2(logits - level), 0.0)
            if statistic == "square":
                p = p * p
            elif statistic == "entropy":
                p = jnp.where(p > 0, p * (level - logits) * math.log(2), 0.0)
        return [a + _weighted_sum(p, inputs.weight, r, row, inside) for r, a in enumerate(sums)]

    zero = jnp.zeros((keys,), jnp.float32)
    sums = jax.lax.fori_loop(first, -(-count // rows), step, [zero] * inputs.weight.shape[0])
    for r, a in enumerate(sums):
        triton.store(mass_ref.at[jnp.full_like(key, r), key], a, mask=in_range)


def _weighted_sum(p: Any, weight: Any, r: int, column: Any, inside: Any) -> Any:
    """The sum over the last axis of p, with the weights of line r for these columns."""
    return jnp.sum(p * gpu.load(weight, jnp.full_like(column, r), column, mask=inside)[None], axis=1)
