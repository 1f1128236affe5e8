"""decode_attention in plain XLA for a CPU, where the segments of a row's heads lie side by side.

A block is some slots with all their heads, as they lie in memory, so it is read in one piece and in order: twice as
fast as head by head (`ragged`), where each head's numbers are a few cache lines apart. Slots that are some heads' only
are masked for the others, so this pays where segments begin and end at much the same slots, as they do unless a method
gives heads budgets of their own; and in a tail.

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · C slots of a block · H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ragged import normalized

_BYTES = 9 * 2**15  # of a block's keys: just enough for XLA to copy it with more than one core
_LEAST, _MOST = 16, 128  # slots of a block
_WIDE = 64  # head dims from which a block's keys stay in the order they lie in


class _Spans(NamedTuple):
    """The slots that a row's segments cover together; of a row without entries none."""

    first: Int[Array, " B"]
    end: Int[Array, " B"]


class _State(NamedTuple):
    """Of an online softmax, unnormalized."""

    total: Float[Array, "B K G H"]
    peak: Float[Array, "B K G"]
    weight: Float[Array, "B K G"]


def pays(start: Int[Array, "B K"], length: Int[Array, "B K"]) -> Bool[Array, ""]:
    """Whether reading all heads' slots of what their segments cover is less work than reading head by head."""
    first, end = _spans(start, length)
    return jnp.sum(end - first) * start.shape[1] <= 2 * jnp.sum(length)


def is_small(slots: int, slot_bytes: int) -> bool:
    """Whether so many slots are few blocks, so that it pays, or hardly costs, wherever segments lie."""
    return slots <= 4 * _block(slots, slot_bytes)


def attend_together(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P K H"],
    v: Float[Array, "B P K H"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """The attention and the log of its denominator, as `decode_attention` says; free slots must hold finite numbers."""
    batch, slots, kv_heads, head_dim = k.shape
    block = _block(slots, kv_heads * head_dim * k.dtype.itemsize)
    grouped = q.reshape(batch, kv_heads, -1, head_dim)
    first, end = _spans(start, length)
    blocks = -(-(end - first) // block)
    ends = jnp.cumsum(blocks)  # the blocks of all rows form one queue

    def step(i: Array, state: _State) -> _State:
        row = jnp.sum(i >= ends)
        begin = first[row] + (i - (ends - blocks)[row]) * block
        at = jnp.minimum(begin, slots - block)  # the last block of a pool may reach back into the one before
        keys, values = (jax.lax.dynamic_slice(x, (row, at, 0, 0), (1, block, *x.shape[2:]))[0] for x in (k, v))
        place = at + jnp.arange(block)
        inside = (place >= jnp.maximum(start[row], begin)[:, None]) & (place < (start + length)[row][:, None])
        x = _products(keys, grouped[row]) * head_dim**-0.5
        x = jnp.where(inside[:, None], x, -jnp.inf)
        peak = jnp.maximum(state.peak[row], jnp.max(x, axis=-1))
        shift = jnp.where(jnp.isfinite(peak), peak, 0.0)
        p, rest = jnp.exp(x - shift[..., None]), jnp.exp(state.peak[row] - shift)
        part = jnp.einsum("kgc,ckh->kgh", p.astype(values.dtype), values, preferred_element_type=jnp.float32)
        return _State(
            state.total.at[row].set(state.total[row] * rest[..., None] + part),
            state.peak.at[row].set(peak),
            state.weight.at[row].set(state.weight[row] * rest + jnp.sum(p, axis=-1)),
        )

    each = grouped.shape[:3]
    state = _State(jnp.zeros(grouped.shape), jnp.full(each, -jnp.inf), jnp.zeros(each))
    out, lse = normalized(*jax.lax.fori_loop(0, ends[-1], step, state))
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _products(keys: Float[Array, "C K H"], q: Float[Array, "K G H"]) -> Float[Array, "K G C"]:
    """q k^T of every head. With q first XLA turns the keys, number by number, which pays for narrow heads only."""
    if keys.shape[2] < _WIDE:
        return jnp.einsum("kgh,ckh->kgc", q, keys, preferred_element_type=jnp.float32)
    return jnp.swapaxes(jnp.einsum("ckh,kgh->kcg", keys, q, preferred_element_type=jnp.float32), 1, 2)


def _spans(start: Int[Array, "B K"], length: Int[Array, "B K"]) -> _Spans:
    some = length > 0
    end = jnp.max(jnp.where(some, start + length, 0), axis=1)
    first = jnp.min(jnp.where(some, start, end[:, None]), axis=1)
    return _Spans(first, end)


def _block(slots: int, slot_bytes: int) -> int:
    fit = _BYTES // slot_bytes // _LEAST * _LEAST
    return min(slots, max(_LEAST, min(_MOST, fit)))
