"""core_attention in plain XLA: listed slots and text, gathered a few blocks at a time without a copy of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import ragged
from pallas_kernels.core_attention.reference import CoreArguments
from pallas_kernels.decode_attention.reference import Attended


def core_attention_xla(args: CoreArguments) -> Attended:
    """Implements `core_attention`. The entries of a segment are the listed slots, then the text slots."""
    offsets, count, text, max_length = args.offsets, args.count, args.text, args.max_length
    (batch, listed), kv_heads = offsets.shape, args.start.shape[1]
    entries = count[:, None] + jnp.maximum(args.length - text, 0)

    def place_of(segment: Array, number: Array) -> Array:
        row = segment // kv_heads
        # Numbers are clipped to listed entries, because other slots must not be read, not even masked.
        entry = jnp.minimum(number, entries.reshape(-1)[segment] - 1)
        of_list = offsets.at[row, entry].get(mode="clip") if listed else 0
        return jnp.where(entry < count[row], of_list, text.reshape(-1)[segment] + entry - count[row])

    out, lse, mass = ragged.attend(args, entries.reshape(-1), place_of)
    if mass is None:
        return out, lse, None
    place, number, bound = jnp.arange(max_length), jnp.arange(listed), mass.shape[-1]
    listed_place = jnp.where(number < count[:, None], offsets, max_length)
    # For every slot the index of its entry, or `bound` if it has none.
    entry = jnp.full((batch, max_length), bound).at[jnp.arange(batch)[:, None], listed_place].set(number, mode="drop")
    where = jnp.where(place < text[..., None], entry[:, None], count[:, None, None] + place - text[..., None])
    where = where.reshape(-1, 1, max_length)
    spread = jax.vmap(lambda m, w: m.at[:, w[0]].get(mode="fill", fill_value=0.0))(mass, where)
    return out, lse, spread.reshape(*args.q.shape[:2], max_length)
