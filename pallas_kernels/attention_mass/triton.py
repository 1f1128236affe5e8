"""attention_mass in Triton, for A100 and H100: the log-sum-exp of each row, then the sum over rows for each key.

It makes two passes over q k^T and stores O(T) numbers between them, or one pass if the log-sum-exps are given. In the
last pass, a program owns a block of keys of one head and loops over all rows that may attend to them. So there are no
atomic additions, and results are bitwise reproducible.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · H head dim · I rows of one iteration · J keys
of a program.
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
from pallas_kernels.attention_mass.reference import MassArguments
from pallas_kernels.attention_mass_rows.triton import softmax_rows, unsupported
from pallas_kernels.denominator import add_constant

__all__ = ["attention_mass_triton", "unsupported"]


def attention_mass_triton(args: MassArguments, *, interpret: bool = False) -> Float[Array, "R N S"]:
    """Implements `attention_mass`."""
    q, k, row_weight, lse, statistic = args.q, args.k, args.row_weight, args.lse, args.statistic
    heads, count, head_dim = q.shape
    kv_heads, slots, _ = k.shape
    if lse is None or statistic == "count":
        _, lse, peak = softmax_rows(args, None, interpret=interpret)
    if statistic == "count":
        level = peak + (math.log(args.threshold) if args.threshold > 0 else -math.inf)  # the smallest logit that counts
    else:
        level = add_constant(lse, args.softmax_n)
    lines = row_weight.shape[0]
    # Here a program keeps its keys and loops over rows; in the other pass it is the reverse, so the sizes are swapped.
    size = gpu.product_sizes(k.dtype)
    keys, rows = size["stay"], min(size["pass"], gpu.padded(count))
    (mass,) = gpu.pallas_call(
        functools.partial(
            _kernel, causal=args.causal, in_order=args.in_order, statistic=statistic, rows=rows, keys=keys
        ),
        grid=(-(-slots // keys), heads),
        in_specs=(
            pl.BlockSpec((None, count, head_dim), lambda block, head: (head, 0, 0)),
            pl.BlockSpec((None, slots, head_dim), lambda block, head: (head // (heads // kv_heads), 0, 0)),
            pl.BlockSpec((lines, count), lambda block, head: (0, 0)),
            pl.BlockSpec((slots,), lambda block, head: (0,)),
            pl.BlockSpec((count,), lambda block, head: (0,)),
            pl.BlockSpec((None, count), lambda block, head: (head, 0)),
        ),
        out_specs=(pl.BlockSpec((lines, None, slots), lambda block, head: (0, head, 0)),),
        out_shape=(jax.ShapeDtypeStruct((lines, heads, slots), jnp.float32),),
        name="attention_mass",
        warps=size["warps"],
        stages=size["stages"],
        interpret=interpret,
    )(q, k, row_weight.astype(jnp.float32), args.key_mask, args.row_place, level)
    return mass


def _kernel(
    q_ref,  # [T, H]
    k_ref,  # [S, H]
    weight_ref,  # [R, T]
    mask_ref,  # [S]
    place_ref,  # [T]
    level_ref,  # [T]: log-sum-exp; for "count", the smallest logit that counts
    mass_ref,  # [R, S]
    *,
    causal: bool,
    in_order: bool,
    statistic: str,
    rows: int,
    keys: int,
):
    count, head_dim = q_ref.shape
    slots = k_ref.shape[0]
    key = pl.program_id(0) * keys + jnp.arange(keys)
    there = key < slots
    k = gpu.load_rows(k_ref, key, there)
    exists = gpu.load(mask_ref, key, mask=there, other=False)[:, None]
    first = jax.lax.div(pl.program_id(0) * keys, rows) if causal and in_order else jnp.int32(0)

    def step(i, sums):  # the product is transposed, [J, I], so that the sum over rows stays within a warp
        row = i * rows + jnp.arange(rows)
        inside = row < count
        q = gpu.load_rows(q_ref, row, inside)
        allowed = exists & inside[None]
        if causal:
            allowed = allowed & (key[:, None] <= gpu.load(place_ref, row, mask=inside, other=-1)[None])
        logits = gpu.logits(k, q, head_dim**-0.5 * math.log2(math.e))
        level = gpu.load(level_ref, row, mask=inside)[None] * math.log2(math.e)
        if statistic == "count":
            p = (allowed & (logits >= level)).astype(jnp.float32)
        else:
            p = jnp.where(allowed, jnp.exp2(logits - level), 0.0)
            if statistic == "square":
                p = p * p
            elif statistic == "entropy":
                p = jnp.where(p > 0, p * (level - logits) * math.log(2), 0.0)
        return [
            a + jnp.sum(p * gpu.load(weight_ref, jnp.full_like(row, r), row, mask=inside)[None], axis=1)
            for r, a in enumerate(sums)
        ]

    zero = jnp.zeros((keys,), jnp.float32)
    sums = jax.lax.fori_loop(first, -(-count // rows), step, [zero] * weight_ref.shape[0])
    for r, a in enumerate(sums):
        triton.store(mass_ref.at[jnp.full_like(key, r), key], a, mask=there)
