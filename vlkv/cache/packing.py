"""Packs the kept entries of all layers into one pool.

Axes: as in `pool.py`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels import Quantized, quantize_rotated
from pallas_kernels.cpu import restored, stored
from pallas_kernels.dispatch import target_platform
from vlkv.cache.parts import Part, slot_of, slot_parts, split
from vlkv.cache.pool import ALIGNMENT, Digits, PackedCache, Storage, segment_slots
from vlkv.errors import InputError
from vlkv.masks import tokens_at

# Most slots that `_write_segments` writes at a time. On a GPU an iteration takes 50 us, because the host starts it
# and waits for its end, so it writes more slots.
_SLOTS_AT_A_TIME, _ON_A_GPU = 512, 8192

# Keys or values of all layers: one array, or one array per layer, which may have unequal lengths.
Entries = Float[Array, "L B K T H"] | tuple[Float[Array, "B K _t H"], ...]


def by_column(x: Int[Array, "L B K"], columns: int) -> Int[Array, "segments B #K"]:
    """Reorders a table as its segments follow one another in each column: by layer, in one column also by head."""
    layers, batch, _ = x.shape
    return jnp.moveaxis(x.reshape(layers, batch, -1, columns), 2, 1).reshape(-1, batch, columns)


def sum_before(x: Int[Array, "L B K"], columns: int) -> Int[Array, "L B K"]:
    """For every segment, the sum of x over the segments before it in its column."""
    (layers, batch, heads), ordered = x.shape, by_column(x, columns)
    sums = (jnp.cumsum(ordered, axis=0) - ordered).reshape(layers, -1, batch, columns)
    return jnp.moveaxis(sums, 1, 2).reshape(layers, batch, heads)


def align(n: Any, tile: int = ALIGNMENT) -> Any:
    """Rounds up to a multiple of `tile`."""
    return -(-n // tile) * tile


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Sizes of the cache that a policy needs for prompts within given bounds. It is static under jit.

    Slots are per key head, without those that alignment adds. They include free slots for new entries if `reuses`.
    """

    layers: int
    slots: int  # of the segments of all layers together
    longest: int  # of the segment of one layer
    limit: int  # of the largest segment under any allocation of the budget; with `reuses`, `longest`
    new_tokens: int  # capacity for new tokens
    reuses: bool  # whether new entries take free slots instead of a tail
    per_head: bool  # whether heads have different budgets
    storage: Storage | None  # as in `Stages`
    softmax_n: float  # as in `Stages`
    rings: tuple[int, ...] = ()  # slots of the ring of each layer with a sliding window; `layers` does not count these
    outside: int = 0  # bound on the entries of one layer that are kept besides the budget

    def columns(self, kv_heads: int) -> int:
        """Columns of the pool (`#K`): one if all heads share it."""
        return 1 if self.per_head else kv_heads

    @property
    def tile(self) -> int:
        """Alignment of segments, chosen so that no group of quantised keys belongs to two layers."""
        return ALIGNMENT if self.storage is None else math.lcm(ALIGNMENT, self.storage.group or 1)

    def pool(self, parts: int) -> int:
        """Slots of the pool per key head, with the alignment of segments in every part.

        Without `reuses`, methods with the same total have pools of the same size, so that comparisons are fair. A
        method with `per_head` may need one tile more.
        """
        if self.layers == 0:
            return 0
        slots = (self.slots + self.layers * (parts - 1)) // parts  # of a part, which may have one more per segment
        slots += self.layers * (self.tile - 1)  # alignment adds at most these
        # A segment fills whole tiles, so a last, incomplete tile is useless, except if heads share a column.
        slots = align(slots, self.tile) if self.per_head else slots // self.tile * self.tile
        return parts * max(self.tile, min(slots, self.layers * align(-(-self.limit // parts), self.tile)))

    @property
    def segment_digits(self) -> tuple[int, int]:
        """With `Storage.budget_digits`: digits of a segment for each number of keys and of values, 8 for 16 bits."""
        assert self.storage is not None and self.storage.budget_digits is not None
        # Entries that the budget would store in 16 bits. The others, out of scope, have 16 bits anyway.
        in_budget = (self.slots // max(self.layers, 1) - self.outside) // self.storage.budget_digits[1]
        keys, values = (in_budget * digits + 8 * self.outside for digits in self.storage.budget_digits)
        return keys, values

    def pool_bytes(self, channels: int, number: int, parts: int = 1) -> int:
        """Bytes of keys and values of the pool, per key head of `channels` numbers, which have `number` bytes."""
        slots, storage = self.pool(parts), self.storage
        if storage is None:
            return 2 * slots * channels * number
        if storage.budget_digits is not None:
            lines = channels + segment_slots(slots, self.layers)  # each has a scale, a minimum and a number of digits
            return self.layers * (sum(self.segment_digits) * channels // 4 + lines * (2 * number + 1))
        codes, group = slots * channels * storage.bits // 8, storage.group
        if group is None:
            return 2 * (codes + number * slots)
        return 2 * codes + 2 * number * (-(-slots // group) * channels + slots * -(-channels // group))

    def tail(self, parts: int) -> int:
        """Slots of the tail of one layer."""
        return 0 if self.reuses else align(self.new_tokens, parts)

    def allocated(self, parts: int = 1) -> int:
        """Slots of a row and key head, in the pool, and in the tails and rings of all layers."""
        return self.pool(parts) + self.layers * self.tail(parts) + sum(self.rings)


def pack(
    spec: CacheSpec,
    k: Entries,
    v: Entries,
    kept: Bool[Array, "L B K T"],
    *,
    is_vision: Bool[Array, "L B T"],
    source: Int[Array, "L B *K T"],
    next_position: Int[Array, "B A"],
    requested: Int[Array, "L B K"] | None = None,
    digits: Digits | None = None,
) -> PackedCache:
    """Moves the kept entries of all layers into one pool.

    If the pool is quantised, the tail is in full precision unless `Storage.tail`; see `quantize_old` for what attention
    sees of it.

    Args:
        spec: from `cache_spec`.
        k: of all layers in one array, or one per layer; a layer with fewer tokens has a shorter array.
        v: as k.
        kept: tokens that each layer keeps, padded to the longest layer, like the next two.
        is_vision: which tokens come from an image.
        source: index of each token in the prompt; may differ between heads.
        next_position: as in `PackedCache`.
        requested: slots that the policy requests for each segment if slots are reused, else None. A segment gets at
            least one slot more than its entries. If the sum exceeds the pool, upper layers get fewer slots; this may
            happen if a short prompt keeps more than the policy's share.
        digits: of all tokens and channels with `Storage.budget_digits`, else None. Then all segments get equally many
            slots.
    """
    layers, batch, heads, _ = kept.shape
    columns = spec.columns(heads)
    parts = slot_parts(columns)
    window = None if spec.storage is None else spec.storage.window
    if parts > 1 and (window is not None or digits is not None):
        what = f"window={window} needs" if digits is None else "entries with unequal bits need"
        raise InputError(f"{what} a mesh whose `model` axis divides the {columns} columns of the pool")
    slots = spec.pool(parts) * heads // columns  # of a column
    granted = jnp.sum(kept, axis=-1, dtype=jnp.int32)  # slots of each segment [L, B, K]
    if requested is not None:
        total = spec.slots * heads // columns
        granted = _with_free_slots(granted, jnp.minimum(requested, spec.longest), total, columns)
    pool, tail, per_segment = "B K P H", None if spec.reuses else "B K L P H", "L B K"
    layout = _Layout(spec, layers, columns == heads, slots, slots // parts, parts)
    entries = "B K T H" if isinstance(k, tuple) else "L B K T H"
    axes = entries, entries, "L B K T", per_segment, "L B T", "L B T" if source.ndim == 3 else "L B K T", per_segment
    outputs = pool, pool, "B K P", per_segment, tail, tail
    run = split(partial(_pack_part, layout), axes, outputs, batch=batch, kv_heads=heads, parts=parts)
    packed_k, packed_v, token, start, tail_k, tail_v = run(k, v, kept, granted, is_vision, source, digits)
    return PackedCache(
        k=packed_k, v=packed_v, token=token, start=start, extent=granted, tail_k=tail_k, tail_v=tail_v,
        used=jnp.zeros(batch, jnp.int32), next_position=next_position, softmax_n=spec.softmax_n, parts=parts,
        full_precision=window, longest=max(1, spec.longest),
    )  # fmt: skip


class _Layout(NamedTuple):
    """Sizes of the pool that do not depend on the device."""

    spec: CacheSpec
    layers: int
    by_head: bool  # whether the pool has a column for each key head
    slots: int  # of a column
    local_slots: int  # of a column, on each device
    parts: int


def _pack_part(
    layout: _Layout,
    part: Part,
    k: Entries,
    v: Entries,
    kept: Bool[Array, "L B K T"],
    granted: Int[Array, "L B K"],
    *tables: Any,
) -> tuple[Any, ...]:
    """Packs the rows, heads and slots of one device. `tables` are is_vision, source and digits, as in `pack`."""
    is_vision, source, digits = tables
    spec, (_, rows, heads, _), head_dim = layout.spec, kept.shape, k[0].shape[-1]
    columns, tile = heads if layout.by_head else 1, spec.tile
    rounded, filled = (
        align(-(-count // layout.parts), tile) for count in (granted, jnp.sum(kept, axis=-1, dtype=jnp.int32))
    )
    if digits is not None:
        rounded = jnp.full_like(rounded, segment_slots(layout.slots, layout.layers))
    start = sum_before(rounded, columns)
    # A loop is compiled once for all layers.
    order = jax.lax.map(partial(_tokens_of_slots, layout, part), (kept, is_vision, start))
    shape, dtype = (rows, columns, layout.local_slots), k[0].dtype
    pools: tuple[Array, ...] = (
        *(stored(jnp.zeros((*shape, head_dim), dtype)) for _ in "kv"),
        jnp.full(shape, -1, jnp.int32),
        *(() if digits is None else [jnp.zeros(shape, jnp.uint8)]),
    )
    numbers = (source.astype(jnp.int32), *(() if digits is None else (digits.values,)))
    entries, longest = jax.tree.map(stored, (k, v)), align(max(1, spec.longest), tile)
    pools = _write_segments(pools, entries, numbers, order, start, start + filled, longest=longest)
    pool_k, pool_v, token = restored(pools[0], dtype), restored(pools[1], dtype), pools[2]
    packed_k: Array | Quantized = pool_k
    packed_v: Array | Quantized = pool_v
    if spec.storage is not None:
        unequal = () if digits is None else (digits._replace(values=pools[3]), spec.segment_digits)
        packed_k, packed_v = spec.storage.quantize(pool_k, pool_v, token >= 0, *unequal)
    tail_shape = rows, heads, layout.layers, spec.tail(layout.parts) // layout.parts, head_dim
    # Two tails, because shared buffers cannot be donated.
    return packed_k, packed_v, token, start, *(_empty_tail(spec, tail_shape, dtype) for _ in "kv")


def _tokens_of_slots(layout: _Layout, part: Part, layer: tuple[Array, Array, Array]) -> Int[Array, "B K T"]:
    """The token in each slot of a layer's segment on this device, in order, then -1.

    `layer` has `kept`, `is_vision` and `start` of the layer.
    """
    kept, is_vision, start = layer
    entry, local_slots, length = _vision_first(kept, is_vision[:, None]), layout.local_slots, kept.shape[-1]
    slot = part.local_slot(slot_of(entry, start[..., None], layout.slots, layout.parts), local_slots)
    place = jnp.where(kept & (slot < local_slots), slot - start[..., None], length)
    return jax.vmap(jax.vmap(partial(tokens_at, places=length)))(place)


def _empty_tail(spec: CacheSpec, shape: tuple[int, ...], dtype: Any) -> Any:
    if spec.reuses:
        return None
    empty = jnp.zeros(shape, dtype)
    if spec.storage is None or not spec.storage.tail:
        return empty
    return quantize_rotated(empty, jnp.zeros(shape[:-1], bool), bits=spec.storage.bits)


def _with_free_slots(
    counts: Int[Array, "L B K"], requested: Int[Array, "L B K"], total: int, columns: int
) -> Int[Array, "L B K"]:
    """Slots of each segment: `requested`, but at least one more than its entries, and `total` in each column.

    If `total` is too small, upper layers get fewer. The sum exceeds `total` only if the least numbers of slots do.
    """
    least = counts + 1
    spare = jnp.maximum(requested - least, 0)
    free = jnp.maximum(total - jnp.sum(by_column(least, columns), axis=0), 0)
    return least + jnp.clip(spare, 0, jnp.maximum(free - sum_before(spare, columns), 0))


def _vision_first(kept: Bool[Array, "B K T"], is_vision: Bool[Array, "B 1 T"]) -> Int[Array, "B K T"]:
    """The index of each kept token in its segment: vision tokens come first, then text."""
    vision, text = kept & is_vision, kept & ~is_vision
    after = jnp.sum(vision, axis=-1, keepdims=True)
    return jnp.where(vision, jnp.cumsum(vision, axis=-1) - 1, after + jnp.cumsum(text, axis=-1) - 1)


def _write_segments(
    pools: tuple[Shaped[Array, "B #K P ..."], ...],
    entries: tuple[Entries, Entries],
    tables: tuple[Shaped[Array, "L B ..."], ...],  # [L, B, K, T], or [L, B, T] for all heads
    order: Int[Array, "L B K T"],
    start: Int[Array, "L B K"],
    end: Int[Array, "L B K"],
    *,
    longest: int,
) -> tuple[Array, ...]:
    """Writes all segments: slot `start` + i gets the token `order[i]`, up to the first -1.

    The first two pools get keys and values from `entries`, the others numbers from `tables`. A loop, compiled once for
    all layers, writes windows of at most `longest` slots, in all columns at a time. One scatter of all values would be
    slow, because XLA for TPU sorts its indices, and a scatter per head transposes the pool twice.
    """
    layers, rows, heads, tokens = order.shape
    columns, slots = pools[0].shape[1:3]
    groups = heads // columns  # a group has a head in each column, and its heads are written together
    first_head, column = jnp.arange(groups) * columns, jnp.arange(columns)
    low = jnp.min(start.reshape(layers, rows, groups, -1), axis=3)
    high = jnp.max(end.reshape(layers, rows, groups, -1), axis=3)
    size = min(_ON_A_GPU if target_platform() == "gpu" else _SLOTS_AT_A_TIME, longest, slots)
    windows = jnp.max(-(-(high - low) // size), axis=(1, 2))  # of the longest one in each layer

    def write_layer(layer: Int[Array, ""], pools: tuple[Array, ...]) -> tuple[Array, ...]:
        def write_window(i: Int[Array, ""], pools: tuple[Array, ...]) -> tuple[Array, ...]:
            segment = jax.lax.div(i, windows[layer])  # `//` would need ten operations, because it handles signs
            row, group = jax.lax.div(segment, groups), jax.lax.rem(segment, groups)
            head = first_head[group] + column
            # A window that would exceed the pool begins earlier, and leaves unchanged what is not new.
            first = jnp.minimum(low[layer, row, group] + jax.lax.rem(i, windows[layer]) * size, slots - size)
            entry = first + jnp.arange(size) - start[layer, row, head][:, None]  # [#K, slots of the window]
            token = _take(order, layer, row, head[:, None], jnp.clip(entry, 0, tokens - 1))
            is_new = (entry >= 0) & (entry < tokens) & (token >= 0)
            token = jnp.maximum(token, 0)

            def write(pool: Array, new: Array) -> Array:
                window = (row, 0, first) + (0,) * (pool.ndim - 3)
                sizes = (1, columns, size, *pool.shape[3:])
                old = jax.lax.dynamic_slice(pool, window, sizes, allow_negative_indices=False)[0]
                new = jnp.where(is_new.reshape(columns, size, *[1] * (pool.ndim - 3)), new, old)
                return jax.lax.dynamic_update_slice(pool, new[None], window, allow_negative_indices=False)

            of_head, of_row = (layer, row, head[:, None], token), (layer, row, token)
            new = _read(entries, *of_head) + tuple(_take(x, *(of_head if x.ndim > 3 else of_row)) for x in tables)
            return tuple(map(write, pools, new))

        return jax.lax.fori_loop(0, rows * groups * windows[layer], write_window, pools)

    return jax.lax.fori_loop(0, layers, write_layer, pools)


def _read(entries: tuple[Entries, Entries], layer: Int[Array, ""], *where: Array) -> tuple[Array, ...]:
    """Keys and values of a layer, which is chosen when the program runs."""
    k, v = entries
    if not isinstance(k, tuple) and not isinstance(v, tuple):
        return _take(k, layer, *where), _take(v, layer, *where)
    of_layers = [lambda *where, kv=kv: tuple(_take(x, *where) for x in kv) for kv in zip(k, v, strict=True)]
    arrays: tuple[Array, ...] = jax.lax.switch(layer, of_layers, *where)
    return arrays


def _take(x: Array, *where: Array) -> Array:
    return x.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)
