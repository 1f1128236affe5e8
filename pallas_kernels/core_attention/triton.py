"""core_attention in Triton, for A100 and H100: listed slots are read from the pool by index, without a copy.

The kernel is the one of decode_attention, which maps the number of an entry to its slot: the first `count` entries are
the listed slots, the others the text slots in order. Parts are cut from both together.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.triton import attend, unsupported

__all__ = ["core_attention_triton", "unsupported"]


def core_attention_triton(
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
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Any]:
    """Implements `core_attention` in Triton."""
    if not offsets.shape[1]:  # Triton does not accept an empty array
        offsets = jnp.zeros((offsets.shape[0], 1), offsets.dtype)
    listed = offsets, count, text
    return attend(q, k, v, start, length, listed, valid, max_length, return_mass, interpret=interpret)
