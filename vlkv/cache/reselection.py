"""What a cache holds besides keys and values, so that its entries can be selected again (`compose(..., every=n)`).

The tail of such a cache has n slots. When it is full, `vlkv.recompress` reads the entries of pool and tail, selects
among them, and packs the selected ones into the same pool. Then the tail is empty again, so the cache never grows.

Axes: as in `pool.py`; E entries of a segment, up to a static bound · T = E + S · N query heads · W newest queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import QuantizedPool
from pallas_kernels.quantized import dequantize
from vlkv.cache.marks import Reselection
from vlkv.cache.parts import slot_of
from vlkv.cache.pool import PackedCache


class Entries(NamedTuple):
    """All entries of a cache: those of the segments, which end at E, then those of the tail."""

    k: Float[Array, "L B K T H"]
    v: Float[Array, "L B K T H"]
    held: Bool[Array, "L B K T"]  # whether there is an entry
    number: Int[Array, "L B K T"]
    is_vision: Bool[Array, "L B K T"]
    place: Int[Array, "L B K T M"] | None  # as in `Reselection`


def note(
    cache: PackedCache,
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"],
    is_vision: Bool[Array, "B T"],
    grid: Int[Array, "B T 3"] | None = None,
) -> PackedCache:
    """Notes what new tokens are, before they are fed. A cache that is not selected again is returned as it is.

    `grid` is from `grid_after`; None: the tokens are text.
    """
    again = cache.reselection
    if again is None:
        return cache
    entry = jnp.where(valid, cache.used[:, None] + jnp.cumsum(valid, axis=1) - 1, again.tail)
    row = jnp.arange(len(entry))[:, None]

    def write(x: Array, new: Array) -> Array:
        return x.at[row, entry].set(new.astype(x.dtype), mode="drop")

    again = dataclasses.replace(again, tail_is_vision=write(again.tail_is_vision, is_vision))
    if again.tail_place is not None:
        grid = jnp.full((*valid.shape, 3), -1) if grid is None else grid
        by_name = {"rotation": positions, "grid": grid}
        place = jnp.concatenate([by_name[name] for name in again.places], axis=-1)
        again = dataclasses.replace(again, tail_place=write(again.tail_place, place))
    return dataclasses.replace(cache, reselection=again)


def grid_after(cache: PackedCache, grid: Int[Array, "B T 3"]) -> Int[Array, "B T 3"]:
    """Places on the grid of new tokens, with larger numbers of images than those that the cache has seen.

    Images and frames have at least one token, so the number of all tokens so far is large enough.
    """
    again = cache.reselection
    if again is None:
        return grid
    image = jnp.where(grid[..., :1] < 0, -1, grid[..., :1] + (again.before + cache.used)[:, None, None])
    return jnp.concatenate([image, grid[..., 1:]], axis=-1)


def keep_queries(
    cache: PackedCache, layer: int | Int[Array, ""], q: Float[Array, "B T N H"], entry: Int[Array, "B T"]
) -> PackedCache:
    """Stores the queries of the newest tokens of one layer. `entry`: indices in the tail, of padding too large."""
    again = cache.reselection
    if again is None or again.q is None:
        return cache
    most = again.q.shape[3]
    count = jnp.max(jnp.where(entry < again.tail, entry + 1, 0), axis=1, keepdims=True)
    slot = jnp.where((entry < again.tail) & (entry >= count - most), entry % most, most)
    row = jnp.arange(len(entry))[:, None]
    stored = again.q.at[row, :, layer, slot].set(q.astype(again.q.dtype), mode="drop")
    return dataclasses.replace(cache, reselection=dataclasses.replace(again, q=stored))


def read(cache: PackedCache, aligned: int) -> Entries:
    """All entries of a cache, in full precision. The last entries of all heads are at the same index.

    So are the first `aligned` ones. Heads with fewer entries than others have a gap behind these.
    """
    again, parts = cache.reselection, cache.parts
    assert again is not None and cache.tail_k is not None and cache.tail_v is not None
    layers, batch, heads, most = again.is_vision.shape
    place, count = jnp.arange(most), cache.extent[..., None]
    entry = jnp.where(place < aligned, place, place - most + count)
    present = jnp.where(place < aligned, place < count, entry >= aligned)
    entry = jnp.where(present, entry, 0)
    columns, slots = cache.token.shape[1:]
    slot = jnp.minimum(slot_of(entry, cache.start[..., None], slots, parts), slots - 1)
    slot = jnp.moveaxis(slot, 0, 2)  # [B, K, L, E]

    def of_pool(x: Array) -> Array:  # [B, #K, P, ...] -> [L, B, K, E, ...]
        where = slot.reshape(batch, columns, -1, *(1,) * (x.ndim - 3))
        taken = jnp.take_along_axis(x, where, axis=2)
        return jnp.moveaxis(taken.reshape(batch, heads, layers, most, *x.shape[3:]), 2, 0)

    def of_tail(x: Any) -> Array:  # [B, K, L, S, H] -> [L, B, K, S, H]
        if isinstance(x, QuantizedPool):
            flat = jax.tree.map(lambda y: y.reshape(*y.shape[:2], -1, *y.shape[4:]), x)
            x = dequantize(flat).reshape(*x.shape)
        ordered = jnp.take(x, slot_of(jnp.arange(again.tail), 0, again.tail, parts), axis=3)
        return jnp.moveaxis(ordered, 2, 0)

    def joined(segment: Array, tail: Array, axis: int = 3) -> Array:
        shape = (*segment.shape[:axis], again.tail, *segment.shape[axis + 1 :])
        return jnp.concatenate([segment, jnp.broadcast_to(tail, shape)], axis=axis)

    def marks(segment: Array, tail: Array) -> Array:
        where = entry.reshape(*entry.shape, *(1,) * (segment.ndim - entry.ndim))
        return joined(jnp.take_along_axis(segment, where, axis=3), tail[None, :, None])

    new = jnp.arange(again.tail)
    return Entries(
        k=joined(of_pool(dequantize(cache.k)), of_tail(cache.tail_k)),
        v=joined(of_pool(dequantize(cache.v)), of_tail(cache.tail_v)),
        held=joined(present, (new < cache.used[:, None])[None, :, None]),
        number=joined(of_pool(cache.token), (again.before[:, None] + new)[None, :, None]),
        is_vision=marks(again.is_vision, again.tail_is_vision),
        place=None if again.place is None or again.tail_place is None else marks(again.place, again.tail_place),
    )


def queries(again: Reselection, layer: Int[Array, ""], used: Int[Array, " B"]) -> tuple[Any, Bool[Array, "B T"]]:
    """The queries [B, N, T, H] of one layer, 0 where they are not known, and for which entries they are known."""
    before, tail = again.is_vision.shape[3], jnp.arange(again.tail)
    if again.q is None:
        return None, jnp.zeros((len(used), before + again.tail), bool)
    most = again.q.shape[3]
    known = (tail < used[:, None]) & (tail >= used[:, None] - most)
    q = jnp.take(jax.lax.dynamic_index_in_dim(again.q, layer, 2, keepdims=False), tail % most, axis=2)
    q = jnp.where(known[:, None, :, None], q, 0)
    return jnp.pad(q, [(0, 0), (0, 0), (before, 0), (0, 0)]), jnp.pad(known, [(0, 0), (before, 0)])
