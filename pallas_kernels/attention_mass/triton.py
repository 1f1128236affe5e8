"""attention_mass in Triton, for A100 and H100: each row's log-sum-exp first, then sums down the columns from it.

Two passes over q k^T and O(T) numbers between them. In the second a program owns a block of keys of one head and walks
over the rows; it adds up row by row what each weighting counts and sums over rows once, at the end, so nothing is added
atomically and two runs agree to the bit.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · H head dim · Q weightings of a program ·
I rows of a turn of the loop · J keys of a program.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import program_id, triton
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import gpu
from pallas_kernels.attention_mass_rows.triton import softmax_rows
from pallas_kernels.attention_mass_rows.triton import unsupported as unsupported

_ROWS, _KEYS = 64, 64  # I, J
_LINES = 2  # Q: each costs I x J registers of a program, but another program would multiply q k^T once more


def attention_mass_triton(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    row_weight: Float[Array, "R T"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"],
    *,
    causal: bool,
    in_order: bool,
    softmax_n: float,
    statistic: str,
    threshold: float,
    rows: int = _ROWS,
    keys: int = _KEYS,
    interpret: bool = False,
) -> Float[Array, "R N S"]:
    """As `attention_mass` says. `in_order`: row t stands at place t, so no row before a block of keys sees it."""
    heads, count, head_dim = q.shape
    kv_heads, slots, _ = k.shape
    _, lse, peak = softmax_rows(
        q, k, None, key_mask, row_place, causal=causal, rows=rows, keys=keys, interpret=interpret
    )
    if statistic == "count":
        level = peak + (math.log(threshold) if threshold > 0 else -math.inf)  # what a logit must reach
    else:
        level = jnp.logaddexp(lse, math.log(softmax_n)) if softmax_n else lse
    lines = min(_LINES, row_weight.shape[0])
    pad = -row_weight.shape[0] % lines
    weight = jnp.pad(row_weight.astype(jnp.float32), [(0, pad), (0, 0)])
    (mass,) = gpu.pallas_call(
        functools.partial(_kernel, causal=causal, in_order=in_order, statistic=statistic, rows=rows, keys=keys),
        grid=(-(-slots // keys), heads, weight.shape[0] // lines),
        in_specs=(
            gpu.whole(None, count, head_dim, index=lambda block, head, line: (head, 0, 0)),
            gpu.whole(None, slots, head_dim, index=lambda block, head, line: (head // (heads // kv_heads), 0, 0)),
            gpu.whole(lines, count, index=lambda block, head, line: (line, 0)),
            gpu.whole(slots, index=lambda block, head, line: (0,)),
            gpu.whole(count, index=lambda block, head, line: (0,)),
            gpu.whole(None, count, index=lambda block, head, line: (head, 0)),
        ),
        out_specs=(gpu.whole(lines, None, slots, index=lambda block, head, line: (line, head, 0)),),
        out_shape=(jax.ShapeDtypeStruct((weight.shape[0], heads, slots), jnp.float32),),
        name="attention_mass",
        interpret=interpret,
    )(q, k, weight, key_mask, row_place, level)
    return mass[: row_weight.shape[0]]


def _kernel(
    q_ref,  # [T, H]
    k_ref,  # [S, H]
    weight_ref,  # [Q, T]
    mask_ref,  # [S]
    place_ref,  # [T]
    level_ref,  # [T]: log-sum-exp; or, of "count", the least logit that counts
    mass_ref,  # [Q, S]
    *,
    causal: bool,
    in_order: bool,
    statistic: str,
    rows: int,
    keys: int,
):
    count, head_dim = q_ref.shape
    slots = k_ref.shape[0]
    key = program_id(0) * keys + jnp.arange(keys)
    there = key < slots
    k = gpu.load_rows(k_ref, key, there)
    exists = gpu.load(mask_ref, key, mask=there, other=False)[:, None]
    first = jax.lax.div(program_id(0) * keys, rows) if causal and in_order else jnp.int32(0)

    def step(i, sums):  # the product transposed, [J, I]: sums over rows then stay within a warp
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
            p = p * p if statistic == "square" else p
        return [a + p * gpu.load(weight_ref, jnp.full_like(row, r), row, mask=inside)[None] for r, a in enumerate(sums)]

    zero = jnp.zeros((keys, rows), jnp.float32)
    sums = jax.lax.fori_loop(first, -(-count // rows), step, [zero] * weight_ref.shape[0])
    for r, a in enumerate(sums):
        triton.store(mass_ref.at[jnp.full_like(key, r), key], jnp.sum(a, axis=1), mask=there)
