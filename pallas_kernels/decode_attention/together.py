"""decode_attention in plain XLA for a CPU, for segments of a row's heads that cover about the same slots.

A block is a number of slots of all heads. Reading blocks of all heads is faster than reading head by head (`ragged`),
because one iteration of the loop has more work. Slots that belong to the segments of only some heads are masked for the
others. So this is faster if the segments of all heads begin and end at about the same slots, which is the case unless a
method gives each head its own budget, and always in the tail.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · C slots of a block · H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.cpu import beside
from pallas_kernels.ragged import normalized

_BYTES = 9 * 2**15  # keys of a block: just enough for XLA to copy it with more than one core
_LEAST, _MOST = 16, 128  # slots of a block


class _Spans(NamedTuple):
    """First slot and end of the union of a row's segments; equal if the row has no entries."""

    first: Int[Array, " B"]
    end: Int[Array, " B"]


class _State(NamedTuple):
    """State of an online softmax; `total` is not yet divided by `weight`."""

    total: Float[Array, "B K G H"]
    peak: Float[Array, "B K G"]
    weight: Float[Array, "B K G"]


def is_faster_together(start: Int[Array, "B K"], length: Int[Array, "B K"]) -> Bool[Array, ""]:
    """Whether `attend_together` is faster than reading head by head: it reads at most twice as many entries."""
    first, end = _spans(start, length)
    return jnp.sum(end - first) * start.shape[1] <= 2 * jnp.sum(length)


def is_small(slots: int, slot_bytes: int) -> bool:
    """Whether the pool has so few blocks that `attend_together` is fast for any segments."""
    return slots <= 4 * _block(slots, slot_bytes)


def attend_together(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K P H"],
    v: Float[Array, "B K P H"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attention and log of its denominator, as `decode_attention` returns them. Free slots must hold finite numbers."""
    batch, kv_heads, slots, head_dim = k.shape
    block = _block(slots, kv_heads * head_dim * k.dtype.itemsize)
    grouped = q.reshape(batch, kv_heads, -1, head_dim)
    first, end = _spans(start, length)
    blocks = -(-(end - first) // block)
    ends = jnp.cumsum(blocks)  # the blocks of all rows form one queue

    def step(i: Array, state: _State) -> _State:
        pools, i = beside((k, v), i)
        row = jnp.sum(i >= ends)
        begin = first[row] + (i - (ends - blocks)[row]) * block
        at = jnp.minimum(begin, slots - block)  # the last block of a pool may overlap the one before
        keys, values = (jax.lax.dynamic_slice(x, (row, 0, at, 0), (1, kv_heads, block, head_dim))[0] for x in pools)
        place = at + jnp.arange(block)
        inside = (place >= jnp.maximum(start[row], begin)[:, None]) & (place < (start + length)[row][:, None])
        x = jnp.einsum("kgh,kch->kgc", grouped[row].astype(jnp.float32), keys.astype(jnp.float32)) * head_dim**-0.5
        x = jnp.where(inside[:, None], x, -jnp.inf)
        peak = jnp.maximum(state.peak[row], jnp.max(x, axis=-1))
        shift = jnp.where(jnp.isfinite(peak), peak, 0.0)
        p, rest = jnp.exp(x - shift[..., None]), jnp.exp(state.peak[row] - shift)
        part = jnp.einsum("kgc,kch->kgh", p, values.astype(jnp.float32))
        return _State(
            state.total.at[row].set(state.total[row] * rest[..., None] + part),
            state.peak.at[row].set(peak),
            state.weight.at[row].set(state.weight[row] * rest + jnp.sum(p, axis=-1)),
        )

    each = grouped.shape[:3]
    state = _State(jnp.zeros(grouped.shape), jnp.full(each, -jnp.inf), jnp.zeros(each))
    out, lse = normalized(*jax.lax.fori_loop(0, ends[-1], step, state))
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _spans(start: Int[Array, "B K"], length: Int[Array, "B K"]) -> _Spans:
    some = length > 0
    end = jnp.max(jnp.where(some, start + length, 0), axis=1)
    first = jnp.min(jnp.where(some, start, end[:, None]), axis=1)
    return _Spans(first, end)


def _block(slots: int, slot_bytes: int) -> int:
    fit = _BYTES // slot_bytes // _LEAST * _LEAST
    return min(slots, max(_LEAST, min(_MOST, fit)))
