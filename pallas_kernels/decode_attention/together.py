"""decode_attention in plain XLA for a CPU, for segments of a row's heads that cover about the same slots.

A block is a number of slots of all heads, and an iteration of the loop reads a block of every row. This is faster than
reading head by head (`ragged`), because an iteration has more work, which XLA gives to more cores. The longest row
determines the number of iterations. Slots that belong to the segments of only some heads are masked for the
others. So the segments of a row's heads should begin and end at about the same slots. They do in a cache: a method that
gives each head its own budget has a pool with one column, which is read head by head.

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
    """State of an online softmax, of all rows or of one; `total` is not yet divided by `weight`."""

    total: Float[Array, "*B K G H"]
    peak: Float[Array, "*B K G"]
    weight: Float[Array, "*B K G"]


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
    each = grouped.shape[:3]
    state = _State(jnp.zeros(grouped.shape), jnp.full(each, -jnp.inf), jnp.zeros(each))
    if block == slots:  # such as a short tail: avoids compiling a loop
        inside = _inside(jnp.arange(slots), start, start + length)
        out, lse = normalized(*jax.vmap(_add_block)(state, grouped, k, v, inside))
        return out.reshape(q.shape), lse.reshape(q.shape[:2])
    first, end = _spans(start, length)
    read = jax.vmap(lambda pool, at: jax.lax.dynamic_slice_in_dim(pool, at, block, axis=1))

    def step(i: Array, state: _State) -> _State:
        pools, i = beside((k, v), i)
        begin = first + i * block
        at = jnp.minimum(begin, slots - block)  # the last block of a pool may overlap the one before
        place = at[:, None] + jnp.arange(block)
        inside = jax.vmap(_inside)(place, jnp.maximum(start, begin[:, None]), start + length)
        keys, values = (read(x, at) for x in pools)
        return jax.vmap(_add_block)(state, grouped, keys, values, inside)

    blocks = -(-(end - first) // block)
    out, lse = normalized(*jax.lax.fori_loop(0, jnp.max(blocks), step, state))
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def _add_block(
    state: _State,
    q: Float[Array, "K G H"],
    keys: Float[Array, "K C H"],
    values: Float[Array, "K C H"],
    inside: Bool[Array, "K C"],
) -> _State:
    """The state of one row after a block of entries, of which those `inside` take part."""
    x = jnp.einsum("kch,kgh->kcg", keys.astype(jnp.float32), q.astype(jnp.float32)) * q.shape[-1] ** -0.5
    x = jax.lax.optimization_barrier(x).swapaxes(1, 2)  # XLA would exchange the operands, which takes 6 times as long
    x = jnp.where(inside[:, None], x, -jnp.inf)
    peak = jnp.maximum(state.peak, jnp.max(x, axis=-1))
    shift = jnp.where(jnp.isfinite(peak), peak, 0.0)
    p, rest = jnp.exp(x - shift[..., None]), jnp.exp(state.peak - shift)
    part = jnp.einsum("kgc,kch->kgh", p, values.astype(jnp.float32))
    return _State(state.total * rest[..., None] + part, peak, state.weight * rest + jnp.sum(p, axis=-1))


def _inside(place: Int[Array, " C"], first: Int[Array, "*n"], end: Int[Array, "*n"]) -> Bool[Array, "*n C"]:
    return (place >= first[..., None]) & (place < end[..., None])


def _spans(start: Int[Array, "B K"], length: Int[Array, "B K"]) -> _Spans:
    some = length > 0
    end = jnp.max(jnp.where(some, start + length, 0), axis=1)
    first = jnp.min(jnp.where(some, start, end[:, None]), axis=1)
    return _Spans(first, end)


def _block(slots: int, slot_bytes: int) -> int:
    fit = _BYTES // slot_bytes // _LEAST * _LEAST
    return min(slots, max(_LEAST, min(_MOST, fit)))
