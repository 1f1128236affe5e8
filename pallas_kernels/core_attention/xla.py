"""core_attention in plain XLA: one masked pass."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.xla import decode_attention_xla
from pallas_kernels.quantized import QuantizedPool


def core_attention_xla(
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
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """As `core_attention` says."""
    place = jnp.arange(max_length)
    listed = jnp.where(jnp.arange(rows.shape[1]) < count[:, None], rows, max_length)
    core = (
        jnp.zeros((rows.shape[0], max_length), bool)
        .at[jnp.arange(rows.shape[0])[:, None], listed]
        .set(True, mode="drop")
    )
    taking_part = (core[:, None] & (place < text[..., None])) | (place >= text[..., None])
    if valid is not None:
        taking_part = taking_part & valid
    return decode_attention_xla(q, k, v, start, length, taking_part, max_length, return_mass)
