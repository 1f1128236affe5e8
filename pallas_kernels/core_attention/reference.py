"""The specification of core_attention: its arguments, and a mask of the listed slots and the text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.decode_attention.reference import Attended, DecodeArguments, decode_attention_reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CoreArguments(DecodeArguments):
    """What every backend of `core_attention` takes; the op's docstring describes each argument."""

    offsets: Int[Array, "B C"]
    count: Int[Array, " B"]
    text: Int[Array, "B K"]


def core_attention_reference(args: CoreArguments) -> Attended:
    """Implements `core_attention` directly from its definition."""
    place, text = jnp.arange(args.max_length), args.text[..., None]
    listed = jnp.arange(args.offsets.shape[1]) < args.count[:, None]
    core = jnp.any(listed[..., None] & (args.offsets[..., None] == place), axis=1)[:, None]  # [B, 1, M]
    taking_part = (core & (place < text)) | (place >= text)
    if args.valid is not None:
        taking_part = taking_part & args.valid
    return decode_attention_reference(dataclasses.replace(args, valid=taking_part))
