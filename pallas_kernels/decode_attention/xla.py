"""decode_attention in plain XLA. The work is proportional to the number of used slots."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import quantized, ragged
from pallas_kernels.decode_attention.together import attend_together, is_faster_together, is_small
from pallas_kernels.dispatch import target_platform
from pallas_kernels.quantized import QuantizedPool


def decode_attention_xla(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | QuantizedPool,
    v: Float[Array, "B #K P H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """Implements `decode_attention`. It chooses at run time between all heads at once and head by head."""
    head_by_head = partial(_head_by_head, valid=valid, max_length=max_length, return_mass=return_mass)
    may_choose = target_platform() == "cpu" and valid is None and not return_mass and k.shape[1] == start.shape[1]
    if not may_choose or isinstance(k, QuantizedPool) or isinstance(v, QuantizedPool):
        return head_by_head(q, k, v, start, length)
    if is_small(k.shape[2], k.shape[1] * k.shape[3] * k.dtype.itemsize):
        return *attend_together(q, k, v, start, length), None
    together = is_faster_together(start, length)
    pair = jax.lax.cond(together, attend_together, lambda *arrays: head_by_head(*arrays)[:2], q, k, v, start, length)
    return *pair, None


def _head_by_head(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | QuantizedPool,
    v: Float[Array, "B #K P H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """Attention by the loop of `ragged`, which reads one block of one head at a time."""
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
        "decode_attention", q, length.reshape(-1), read, bound=min(max_length, k.shape[2]),
        itemsize=k.dtype.itemsize, return_logits=return_mass,
    )  # fmt: skip
    if logits is None:
        return out, lse, None
    mass = ragged.probabilities(logits, lse).reshape(*q.shape[:2], -1)
    return out, lse, jnp.pad(mass, [(0, 0), (0, 0), (0, max_length - mass.shape[-1])])


def _fetch(pool: Array | QuantizedPool, row: Array, head: Array, first: Array, count: int) -> Float[Array, "C H"]:
    """Reads `count` slots. In an array, gathered rows are as fast as a slice; in a quantised pool a slice is faster."""
    if isinstance(pool, QuantizedPool):
        return quantized.read_block(pool, row, head, first, count)
    return quantized.read_slots(pool, row, head, first + jnp.arange(count))
