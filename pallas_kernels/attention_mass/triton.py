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
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from pallas_kernels import gpu
from pallas_kernels.attention_mass.reference import MassArguments
from pallas_kernels.attention_mass_rows.triton import Inputs, softmax_rows, unsupported, weighted_sum
from pallas_kernels.denominator import add_constant

__all__ = ["attention_mass_triton", "unsupported"]


def attention_mass_triton(args: MassArguments, *, interpret: bool = False) -> Float[Array, "R N S"]:
    """Implements `attention_mass`."""
    k, row_weight, lse = args.k, args.row_weight, args.lse
    if lse is None or args.statistic == "count":
        _, lse, peak = softmax_rows(args, None, interpret=interpret)
    if args.statistic == "count":
        level = peak + (math.log(args.threshold) if args.threshold > 0 else -math.inf)  # the smallest logit that counts
    else:
        level = add_constant(lse, args.softmax_n)
    inputs = Inputs(args.q, k, row_weight.astype(jnp.float32), args.key_mask, args.row_place, level)
    # Here a program keeps its keys and loops over rows; in the other pass it is the reverse, so the sizes are swapped.
    keys, rows = gpu.product_sizes(k.dtype)
    mass = jax.ShapeDtypeStruct((row_weight.shape[0], args.q.shape[0], k.shape[1]), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, args=args, rows=min(rows, gpu.padded(args.q.shape[1])), keys=keys),
        grid=(-(-k.shape[1] // keys), args.q.shape[0]),
        in_specs=(inputs.specs(),),
        out_specs=gpu.part(mass, None, 1),
        out_shape=mass,
        compiler_params=gpu.PARAMETERS,
        name="attention_mass",
        interpret=interpret,
    )(inputs)


def _kernel(inputs: Inputs, mass_ref: Any, *, args: MassArguments, rows: int, keys: int) -> None:  # mass_ref: [R, S]
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
        return [a + weighted_sum(p, inputs.weight, r, row, inside) for r, a in enumerate(sums)]

    zero = jnp.zeros((keys,), jnp.float32)
    sums = jax.lax.fori_loop(first, -(-count // rows), step, [zero] * inputs.weight.shape[0])
    for r, a in enumerate(sums):
        triton.store(mass_ref.at[jnp.full_like(key, r), key], a, mask=in_range)
