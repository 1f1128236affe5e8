"""core_attention in plain XLA: listed slots and text, gathered a few blocks at a time without a copy of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import quantized, ragged
from pallas_kernels.core_attention.reference import CoreArguments
from pallas_kernels.decode_attention.reference import Attended


def core_attention_xla(args: CoreArguments) -> Attended:
    """Implements `core_attention`. The entries of a segment are the listed slots, then the text slots."""
    q, k, v, start, offsets, count, text = args.q, args.k, args.v, args.start, args.offsets, args.count, args.text
    valid, max_length = args.valid, args.max_length
    (batch, listed), kv_heads, columns = offsets.shape, start.shape[1], k.shape[1]
    begin, behind = start.reshape(-1), text.reshape(-1)
    entries = count[:, None] + jnp.maximum(args.length - text, 0)
    bound = min(max_length, k.shape[2])

    def read(block: int) -> ragged.Read:
        def one(segment: Array, first: Array) -> tuple[Array, Array, Array]:
            row, head = segment // kv_heads, segment % kv_heads
            # Indices are clipped to listed entries, because other slots must not be read, not even masked.
            entry = jnp.minimum(first + jnp.arange(block), entries.reshape(-1)[segment] - 1)
            place = jnp.where(
                entry < count[row],
                offsets.at[row, entry].get(mode="clip") if listed else 0,
                behind[segment] + entry - count[row],
            )
            keys, values = (quantized.read_slots(x, row, head % columns, begin[segment] + place) for x in (k, v))
            if valid is None:
                return keys, values, jnp.ones(block, bool)
            return keys, values, valid.at[row, head, place].get(mode="fill", fill_value=False)

        return one

    out, lse, logits = ragged.attend(
        quantized.to_basis(q, k), entries.reshape(-1), read, bound=bound, itemsize=k.dtype.itemsize,
        return_logits=args.return_mass,
    )  # fmt: skip
    out = quantized.from_basis(out, v)
    if logits is None:
        return out, lse, None
    mass = ragged.probabilities(logits, lse)
    place = jnp.arange(max_length)
    number = jnp.arange(listed)
    listed_place = jnp.where(number < count[:, None], offsets, max_length)
    # For every slot the index of its entry, or `bound` if it has none.
    entry = jnp.full((batch, max_length), bound).at[jnp.arange(batch)[:, None], listed_place].set(number, mode="drop")
    where = jnp.where(place < text[..., None], entry[:, None], count[:, None, None] + place - text[..., None])
    where = where.reshape(-1, 1, max_length)
    spread = jax.vmap(lambda m, w: m.at[:, w[0]].get(mode="fill", fill_value=0.0))(mass, where)
    return out, lse, spread.reshape(*q.shape[:2], max_length)
