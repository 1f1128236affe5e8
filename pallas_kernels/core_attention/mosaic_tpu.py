"""core_attention for TPU: the pass of decode_attention, masked, past blocks that hold no core row.

Rows are not copied one by one: a copy of one slot moves 2 to 16 KiB, less than the memory delivers in the time that
starting a copy takes, so single rows are bound by their number. A block costs its bytes whether one of its slots is in
the core or all. With the core scattered over 0.3 to 0.7 of the vision slots nearly every block holds a row and the
pass reads them all; what is saved is runs of blocks without any, and the text behind is dense either way. This is an
estimate from sizes, not a measurement: no TPU was at hand.

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
    k: Float[Array, "B P K H"] | QuantizedPool,
    v: Float[Array, "B P K H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    rows: Int[Array, "B C"],
    count: Int[Array, " B"],
    text: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """As `core_attention` says."""
    place = jnp.arange(max_length)
    listed = jnp.where(jnp.arange(rows.shape[1]) < count[:, None], rows, max_length)
    row = jnp.arange(rows.shape[0])[:, None]
    core = jnp.zeros((rows.shape[0], max_length), bool).at[row, listed].set(True, mode="drop")
    chosen = core[:, None] | (place >= text[..., None])
    chosen = chosen if valid is None else chosen & valid
    return mosaic_tpu.decode_attention_mosaic_tpu(
        q, k, v, start, length, chosen, max_length, return_mass, interpret=interpret, op="core_attention"
    )


def unsupported(
    q: Array, k: Any, v: Any, start: Array, length: Array, rows: Array, count: Array, text: Array, valid: Any,
    max_length: int, return_mass: bool,
) -> str | None:  # fmt: skip
    """Why the kernel cannot take these arguments; None: it can."""
    masked = jnp.zeros(()) if valid is None else valid
    return mosaic_tpu.unsupported(q, k, v, start, length, masked, max_length, return_mass, op="core_attention")
