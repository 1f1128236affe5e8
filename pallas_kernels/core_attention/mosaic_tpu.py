"""core_attention for TPU: decode_attention with a mask. Blocks without any listed slot are skipped.

Slots are not copied one by one. A copy of one slot moves 2 to 16 KiB, and starting a copy takes longer than that, so
the number of copies would limit the speed. A block costs the same whether one of its slots is listed or all of them.
If the listed slots are scattered over 0.3 to 0.7 of the vision slots, nearly every block holds one and all are read;
only runs of blocks without any are saved. The text is dense in any case. This is an estimate from sizes, not a
measurement on a TPU.

Axes: B batch · N query heads · K key heads · P pool slots · C bound on the listed slots · M bound on a segment ·
H head dim.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention import mosaic_tpu
from pallas_kernels.quantized import QuantizedPool


def core_attention_mosaic_tpu(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | QuantizedPool,
    v: Float[Array, "B #K P H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    offsets: Int[Array, "B C"],
    count: Int[Array, " B"],
    text: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """Implements `core_attention` for TPU."""
    place = jnp.arange(max_length)
    listed = jnp.where(jnp.arange(offsets.shape[1]) < count[:, None], offsets, max_length)
    row = jnp.arange(offsets.shape[0])[:, None]
    core = jnp.zeros((offsets.shape[0], max_length), bool).at[row, listed].set(True, mode="drop")
    chosen = core[:, None] | (place >= text[..., None])
    chosen = chosen if valid is None else chosen & valid
    return mosaic_tpu.decode_attention_mosaic_tpu(
        q, k, v, start, length, chosen, max_length, return_mass, interpret=interpret, op="core_attention"
    )


def unsupported(
    q: Array, k: Any, v: Any, start: Array, length: Array, offsets: Array, count: Array, text: Array, valid: Any,
    max_length: int, return_mass: bool,
) -> str | None:  # fmt: skip
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    masked = jnp.zeros(()) if valid is None else valid
    return mosaic_tpu.unsupported(q, k, v, start, length, masked, max_length, return_mass, op="core_attention")
