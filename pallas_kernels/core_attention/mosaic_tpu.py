"""core_attention for TPU: decode_attention with a mask. Tiles of 16 slots without any listed slot are not read.

So it reads little only if the listed slots share tiles (`reads_tiles`). `vlkv.cache.decode_state.group_core` arranges
this with `swap_slots`. Copying single slots instead would not do. XLA packs two bfloat16 slots into the words of one
row, so the smallest copy holds two: for a tenth of the slots, chosen at random, this is 1.9 times their bytes, and of
tiles of 16 it is 8.1 times. Such a copy moves 1 to 16 KiB, and starting it takes longer than that.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.core_attention.reference import CoreArguments
from pallas_kernels.decode_attention import mosaic_tpu
from pallas_kernels.decode_attention.reference import Attended, DecodeArguments


def core_attention_mosaic_tpu(args: CoreArguments, interpret: bool = False) -> Attended:
    """Implements `core_attention` for TPU."""
    return mosaic_tpu.decode_attention_mosaic_tpu(_masked(args), interpret=interpret, op="core_attention")


def unsupported(args: CoreArguments) -> str | None:
    """Returns why the kernel cannot run with these arguments, or None if it can."""
    return mosaic_tpu.unsupported(args)


def _masked(args: CoreArguments) -> DecodeArguments:
    """The arguments of decode_attention with a mask of the listed slots and the text."""
    place = jnp.arange(args.max_length)
    listed = jnp.where(jnp.arange(args.offsets.shape[1]) < args.count[:, None], args.offsets, args.max_length)
    row = jnp.arange(args.offsets.shape[0])[:, None]
    core = jnp.zeros((args.offsets.shape[0], args.max_length), bool).at[row, listed].set(True, mode="drop")
    chosen = core[:, None] | (place >= args.text[..., None])
    chosen = chosen if args.valid is None else chosen & args.valid
    return DecodeArguments(args.q, args.k, args.v, args.start, args.length, chosen, args.max_length, args.return_mass)
