"""attention_mass_rows in Triton, for A100 and H100: flash attention with the key weights in place of values.

A program computes a block of rows of one head. If there are few rows (gathered ones), the keys are cut into parts,
which are merged by their log-sum-exps. The last rows come first, because under causality they have the most work.
`attention_mass` uses the same kernel to compute log-sum-exps.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim · Z parts · I rows of a
program · J keys of one iteration.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from pallas_kernels import gpu
from pallas_kernels.attention_mass.reference import RowArguments
from pallas_kernels.attention_mass_rows.reference import MassRowsArguments
from pallas_kernels.denominator import add_constant


def unsupported(args: RowArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    return gpu.unsupported(args.q, args.k)


def attention_mass_rows_triton(args: MassRowsArguments, *, interpret: bool = False) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows`. The kernel finds the largest row index of each block without `in_order`."""
    mass, lse, _ = softmax_rows(args, args.key_weight.astype(jnp.float32), interpret=interpret)
    return mass * jnp.exp(lse - add_constant(lse, args.softmax_n)) if args.softmax_n else mass


def softmax_rows(
    args: RowArguments, key_weight: Float[Array, "R S"] | None, *, interpret: bool = False
) -> tuple[Float[Array, "R N T"], Float[Array, "N T"], Float[Array, "N T"]]:
    """Weighted sums of each row's softmax, the log-sum-exp of its logits, and its largest logit.

    A row without any allowed key has sums of 0, and -inf for the other two. Without `key_weight` R is 0.
    """
    q, k = args.q, args.k
    heads, count, head_dim = q.shape
    kv_heads, slots, _ = k.shape
    size = gpu.product_sizes(k.dtype)
    rows, keys = min(size["stay"], gpu.padded(count)), size["pass"]
    blocks = -(-count // rows)
    parts = gpu.splits(heads * blocks, -(-slots // keys))
    lines = 0 if key_weight is None else key_weight.shape[0]
    # The kernel works in base 2, because the hardware has an instruction for powers of two.
    row = pl.BlockSpec((None, None, count), lambda block, head, part: (part, head, 0))
    sums, lse, peak = gpu.pallas_call(
        functools.partial(_kernel, causal=args.causal, rows=rows, keys=keys, parts=parts),
        grid=(blocks, heads, parts),
        in_specs=(
            pl.BlockSpec((None, count, head_dim), lambda block, head, part: (head, 0, 0)),
            pl.BlockSpec((None, slots, head_dim), lambda block, head, part: (head // (heads // kv_heads), 0, 0)),
            None if not lines else pl.BlockSpec((lines, slots), lambda block, head, part: (0, 0)),
            pl.BlockSpec((slots,), lambda block, head, part: (0,)),
            pl.BlockSpec((count,), lambda block, head, part: (0,)),
        ),
        out_specs=(
            None
            if not lines
            else pl.BlockSpec((None, lines, None, count), lambda block, head, part: (part, 0, head, 0)),
            row,
            row,
        ),
        out_shape=(
            None if not lines else jax.ShapeDtypeStruct((parts, lines, heads, count), jnp.float32),
            *[jax.ShapeDtypeStruct((parts, heads, count), jnp.float32)] * 2,
        ),
        name="attention_mass_rows" if lines else "attention_mass_log_sum_exp",
        warps=size["warps"],
        stages=size["stages"],
        interpret=interpret,
    )(q, k, key_weight if lines else None, args.key_mask, args.row_place)
    mass = jnp.zeros((0, heads, count)) if sums is None else gpu.merge(sums, lse[:, None])
    return mass, gpu.total(lse), jnp.max(peak, axis=0)


def _kernel(
    q_ref,  # [T, H]
    k_ref,  # [S, H]
    weight_ref,  # [R, S]; or None
    mask_ref,  # [S]
    place_ref,  # [T]
    sums_ref,  # [R, T]; or None
    lse_ref,  # [T]
    peak_ref,  # [T]
    *,
    causal: bool,
    rows: int,
    keys: int,
    parts: int,
):
    count, head_dim = q_ref.shape
    slots = k_ref.shape[0]
    lines = 0 if weight_ref is None else weight_ref.shape[0]
    last = -(-count // rows) - 1
    row = (last - pl.program_id(0)) * rows + jnp.arange(rows)
    there = row < count
    q = gpu.load_rows(q_ref, row, there)
    place = gpu.load(place_ref, row, mask=there, other=-1)
    many = jnp.minimum(jnp.max(place) + 1, slots) if causal else jnp.int32(slots)
    part = jax.lax.div(many + (parts * keys - 1), parts * keys) * keys
    begin = pl.program_id(2) * part
    end = jnp.minimum(begin + part, many)

    def step(i, state):
        sums, peak, total = state
        key = begin + i * keys + jnp.arange(keys)
        inside = key < end
        k = gpu.load_rows(k_ref, key, inside)
        allowed = gpu.load(mask_ref, key, mask=inside, other=False)[None]
        if causal:
            allowed = allowed & (key[None] <= place[:, None])
        logits = gpu.logits(q, k, head_dim**-0.5 * math.log2(math.e))
        logits = jnp.where(allowed, logits, -jnp.inf)  # [I, J]
        both = jnp.maximum(peak, jnp.max(logits, axis=1))
        shift = jnp.where(both > -jnp.inf, both, 0.0)
        p = jnp.exp2(logits - shift[:, None])
        old = jnp.exp2(peak - shift)
        sums = [
            a * old + jnp.sum(p * gpu.load(weight_ref, jnp.full_like(key, r), key, mask=inside)[None], axis=1)
            for r, a in enumerate(sums)
        ]
        return sums, both, total * old + jnp.sum(p, axis=1)

    zero = jnp.zeros((rows,), jnp.float32)
    state = ([zero] * lines, jnp.full((rows,), -jnp.inf, jnp.float32), zero)
    turns = jax.lax.div(end - begin + (keys - 1), keys)
    sums, peak, total = jax.lax.fori_loop(0, turns, step, state)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    for r, a in enumerate(sums):
        triton.store(sums_ref.at[jnp.full_like(row, r), row], a / total, mask=there)
    triton.store(lse_ref.at[row], jnp.where(some, (peak + jnp.log2(total)) * math.log(2), -jnp.inf), mask=there)
    triton.store(peak_ref.at[row], peak * math.log(2), mask=there)
