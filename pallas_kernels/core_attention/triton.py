"""core_attention in Triton, for A100 and H100: listed slots are read from the pool by index, without a copy.

The kernel is the one of decode_attention, which maps the number of an entry to its slot: the first `count` entries are
the listed slots, the others the text slots in order. Parts are cut from both together.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.core_attention.reference import CoreArguments
from pallas_kernels.decode_attention.reference import Attended
from pallas_kernels.decode_attention.triton import attend, unsupported

__all__ = ["core_attention_triton", "unsupported"]


def core_attention_triton(args: CoreArguments, *, interpret: bool = False) -> Attended:
    """Implements `core_attention` in Triton."""
    offsets = args.offsets
    if not offsets.shape[1]:  # Triton does not accept an empty array
        offsets = jnp.zeros((offsets.shape[0], 1), offsets.dtype)
    return attend(args, (offsets, args.count, args.text), interpret=interpret)
