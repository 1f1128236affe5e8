"""The specification of core_attention: every slot of the segment, masked to the listed slots and the text."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.reference import decode_attention_reference


def core_attention_reference(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"],
    v: Float[Array, "B #K P H"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    offsets: Int[Array, "B C"],
    count: Int[Array, " B"],
    text: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """Implements `core_attention` directly from its definition."""
    place = jnp.arange(max_length)
    listed = jnp.arange(offsets.shape[1]) < count[:, None]
    core = jnp.any(listed[..., None] & (offsets[..., None] == place), axis=1)[:, None]  # [B, 1, M]
    taking_part = (core & (place < text[..., None])) | (place >= text[..., None])
    if valid is not None:
        taking_part = taking_part & valid
    return decode_attention_reference(q, k, v, start, length, taking_part, max_length, return_mass)
