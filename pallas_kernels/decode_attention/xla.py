"""decode_attention in plain XLA. The work is proportional to the used slots, on a CPU to those of the longest row."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import quantized, ragged
from pallas_kernels.decode_attention.reference import Attended, DecodeArguments
from pallas_kernels.decode_attention.together import attend_together
from pallas_kernels.dispatch import target_platform
from pallas_kernels.quantized import Quantized


def decode_attention_xla(args: DecodeArguments) -> Attended:
    """Implements `decode_attention`. On a CPU, a pool with a column for each head is read in blocks of all heads."""
    k, start = args.k, args.start
    plain = args.valid is None and not args.return_mass and k.shape[1] == start.shape[1]
    if target_platform() != "cpu" or not plain or isinstance(k, Quantized) or isinstance(args.v, Quantized):
        return _head_by_head(args)
    return *attend_together(args.q, k, args.v, start, args.length, args.max_length), None


def _head_by_head(args: DecodeArguments) -> Attended:
    """Attention by the loop of `ragged`, which reads one block of one head at a time."""
    q, k, v, start, valid, max_length = args.q, args.k, args.v, args.start, args.valid, args.max_length
    kv_heads, columns = start.shape[1], k.shape[1]
    begin = start.reshape(-1)

    def read(block: int) -> ragged.Read:
        def one(segment: Array, first: Array) -> tuple[Array, Array, Array]:
            row, head, place = segment // kv_heads, segment % kv_heads, first + jnp.arange(block)
            keys, values = (_fetch(x, row, head % columns, begin[segment] + first, block) for x in (k, v))
            if valid is None:
                return keys, values, jnp.ones(block, bool)
            return keys, values, valid.at[row, head, place].get(mode="fill", fill_value=False)

        return one

    out, lse, logits = ragged.attend(
        quantized.to_basis(q, k), args.length.reshape(-1), read,
        bound=min(max_length, k.shape[2]), itemsize=k.dtype.itemsize, return_logits=args.return_mass,
    )  # fmt: skip
    out = quantized.from_basis(out, v)
    if logits is None:
        return out, lse, None
    mass = ragged.probabilities(logits, lse).reshape(*q.shape[:2], -1)
    return out, lse, jnp.pad(mass, [(0, 0), (0, 0), (0, max_length - mass.shape[-1])])


def _fetch(pool: Array | Quantized, row: Array, head: Array, first: Array, count: int) -> Float[Array, "C H"]:
    """Reads `count` slots. In an array, gathered rows are as fast as a slice; in a quantised pool a slice is faster."""
    if isinstance(pool, Quantized):
        return quantized.read_block(pool, row, head, first, count)
    return quantized.read_slots(pool, row, head, first + jnp.arange(count))
