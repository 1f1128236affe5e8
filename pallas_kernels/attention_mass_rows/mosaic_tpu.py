"""attention_mass_rows for TPU: one pass of flash attention in which the weights of the keys take the place of values.

A block of logits has shape [keys, rows], as in attention_mass.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · H head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.attention_mass.mosaic_tpu import (
    Tiles,
    fill_up,
    log_denominator,
    online,
    prepare,
    unsupported_by_both,
    weigh,
)
from pallas_kernels.attention_mass_rows.reference import MassRowsArguments
from pallas_kernels.tpu import FLOOR, interpreter


def attention_mass_rows_mosaic_tpu(args: MassRowsArguments, interpret: bool = False) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows` for TPU."""
    return _mass(args, Tiles.of(args), interpret)


def unsupported(args: MassRowsArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    return unsupported_by_both(args, args.key_weight)


# Under jit, so that it is traced once for all layers of a model, which have the same shapes.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _mass(args: MassRowsArguments, tiles: Tiles, interpret: bool) -> Float[Array, "R N T"]:
    weights, rows = args.key_weight.shape[0], args.q.shape[1]
    arrays = prepare(tiles, args)
    of_head = (1, tiles.heads, weights, tiles.rows)
    mass = pl.pallas_call(
        functools.partial(_rows, tiles=tiles, softmax_n=args.softmax_n),
        grid=(tiles.groups, tiles.row_blocks, tiles.key_blocks),
        in_specs=[
            *tiles.specs(keys_inner=True),
            pl.BlockSpec((weights, tiles.keys), lambda n, i, j: (0, tiles.key_block(i, j))),
        ],
        out_specs=pl.BlockSpec(of_head, lambda n, i, j: (n, 0, 0, i)),
        out_shape=jax.ShapeDtypeStruct((tiles.groups, tiles.heads, weights, arrays[0].shape[2]), jnp.float32),
        scratch_shapes=[pltpu.VMEM((tiles.heads, tiles.rows), jnp.float32)] * 2
        + [pltpu.VMEM(of_head[1:], jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpreter(interpret),
        name="attention_mass_rows",
    )(*arrays, fill_up(args.key_weight.astype(jnp.float32), 1))
    return mass.reshape(args.q.shape[0], weights, -1).swapaxes(0, 1)[..., :rows]


def _rows(*refs: Any, tiles: Tiles, softmax_n: float) -> None:
    *inputs, weight_ref, mass_ref, peak_ref, sum_ref, total_ref = refs
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _() -> None:
        peak_ref[...] = jnp.full_like(peak_ref, FLOOR)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    def use(e: int, logits: Any, allowed: Any) -> None:
        row = slice(e, e + 1)
        peak_ref[row], sum_ref[row], old, exponent = online(logits, allowed, peak_ref[row], sum_ref[row])
        total_ref[e] = total_ref[e] * old + weigh(weight_ref[...], exponent, inputs[0].dtype, (1, 0))

    tiles.visit(inputs, i, j, use)

    @pl.when(j == pl.num_programs(2) - 1)
    def _() -> None:
        share = jnp.exp(peak_ref[...] - log_denominator(peak_ref[...], sum_ref[...], softmax_n))
        for e in range(tiles.heads):
            mass_ref[0, e] = total_ref[e] * share[e : e + 1]
