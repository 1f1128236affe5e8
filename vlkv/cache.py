"""The packed cache: kept prompt entries of all layers in one pool; generated tokens in a tail or in free slots.

Axes: B batch · L layers · K key heads · T prompt tokens, or entries to write · P pool slots · S tail slots ·
H head dim · A position axes · M parts of the slots. A slot is a location in the pool; a position is the value that RoPE
uses. Budgets differ per layer and row, but have a fixed sum, so one pool needs less memory than L padded arrays.

The pool has a column for each key head, in which the segments of all layers follow one another. A segment contains the
entries of one layer, row and key head: vision entries, then text, then free slots, if slots are reused. If the policy
gives heads different budgets (`Policy.per_head`), columns of equal length would waste memory, so the pool has one
column, which contains the segments of all heads (`#K` in the shapes below: K or 1).

If the `model` axis of the mesh does not divide the columns, pool and tail consist of M equal parts, and every M-th
entry is in the same part. `slot_of` returns the slot of an entry for every M.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Kernels, QuantizedPool, dequantize, quantize, write_slots
from vlkv import decode_state, parallel
from vlkv.decode_state import DecodeState
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.observe import tokens_at
from vlkv.policies.policy import DecodingStages, Policy, Storage
from vlkv.sharding import axes, leaves_with_axes, map_with_axes

ALIGNMENT = 16  # slots: every segment starts on a bf16 tile
_SLOTS_AT_A_TIME = 512  # slots that `_write_segments` writes at a time


_POOL, _TABLE = axes("batch", "kv_heads", "slots"), axes(None, "batch", "kv_heads")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCache:
    """A compressed cache during decoding."""

    k: Float[Array, "B #K P H"] | QuantizedPool = field(metadata=_POOL)
    v: Float[Array, "B #K P H"] | QuantizedPool = field(metadata=_POOL)
    # Index in the prompt of the token that was last written to each slot; -1: none, or a new token.
    token: Int[Array, "B #K P"] = field(metadata=_POOL)
    start: Int[Array, "L B K"] = field(metadata=_TABLE)  # first slot of each layer's segment, in each part
    # Number of prompt entries of each segment, vision first, then text, in all parts together. If slots are reused, the
    # number of slots of the segment.
    length: Int[Array, "L B K"] = field(metadata=_TABLE)
    tail_k: tuple[Float[Array, "B K S H"], ...] = field(metadata=_POOL)  # one per layer; none if slots are reused
    tail_v: tuple[Float[Array, "B K S H"], ...] = field(metadata=_POOL)
    used: Int[Array, " B"] = field(metadata=axes("batch"))  # number of new tokens so far
    next_position: Int[Array, "B A"] = field(metadata=axes("batch"))  # counts all tokens, including dropped ones
    decode_states: tuple[DecodeState, ...] | None = None  # one per layer, for methods that update the cache
    policy: Policy | None = field(default=None, metadata={"static": True})  # its `updater` updates `decode_states`
    softmax_n: float = field(default=0.0, metadata={"static": True})  # of decode attention
    kernels: Kernels = field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    parts: int = field(default=1, metadata={"static": True})  # M
    window: int | None = field(default=None, metadata={"static": True})  # see `quantize_old`; None: it is not used

    @property
    def entry_arrays(self) -> list[Array]:
        """All arrays that grow with the number of entries.

        These are keys, values, scales of a quantised pool, the token of every slot, and the decode state.
        """
        return [x for x, names in leaves_with_axes(self) if {"slots", "entries"} & set(names)]

    @property
    def bytes(self) -> int:
        """Allocated bytes of `entry_arrays`."""
        return sum(x.nbytes for x in self.entry_arrays)

    @property
    def whole_axes(self) -> tuple[str, ...]:
        """Axes that no mesh splits."""
        return ("slots",) if self.parts == 1 else ("kv_heads",)

    @property
    def reuses(self) -> bool:
        """Whether new entries take free slots of the pool instead of a tail."""
        return self.decode_states is not None and self.decode_states[0].reuses

    @property
    def new_tokens(self) -> int:
        """Capacity for tokens after the prompt, including those in `used`."""
        return self.decode_states[0].new_tokens if self.decode_states is not None else self.tail_k[0].shape[2]

    @property
    def slots(self) -> int:
        """Slots of a row and key head, in pool and tails."""
        _, columns, slots = self.token.shape
        return slots * columns // self.start.shape[2] + sum(x.shape[2] for x in self.tail_k)

    @property
    def counts(self) -> Int[Array, "L B K"]:
        """Number of stored entries of each segment."""
        if self.decode_states is None:
            return self.length
        return jnp.stack([jnp.sum(m.stored[..., : m.stored.shape[-1] - m.tail], axis=-1) for m in self.decode_states])

    def entries(self, layer: int, most: int) -> Int[Array, "B K most"]:
        """The prompt token of each of the first `most` entries of a layer; see the function `entries`."""
        return entries(self.token, self.start[layer], self.length[layer], most, self.parts)


def slot_of(entry: Any, start: Any, slots: int, parts: int) -> Any:
    """The slot of entry number `entry` of a segment, or of a tail (start 0), in a pool or tail of `slots` slots."""
    if parts == 1:
        return start + entry
    return entry % parts * (slots // parts) + start + entry // parts


def entries(
    token: Int[Array, "B #K P"], start: Int[Array, "B K"], length: Int[Array, "B K"], most: int, parts: int = 1
) -> Int[Array, "B K most"]:
    """The prompt token of each of the first `most` entries of a layer's segment, in order; -1: none, or a new token.

    An entry evicted while decoding is included until its slot is reused; `DecodeState.stored` excludes it.

    Args:
        token: field of a `PackedCache` or an `Output`.
        start: the field's entry for the layer.
        length: the field's entry for the layer.
        most: bound on the number of entries.
        parts: field of the same object.
    """
    number = jnp.arange(most)
    slot = slot_of(number, start[..., None], token.shape[2], parts)
    found = jnp.take_along_axis(token, slot, axis=2, mode="clip")
    return jnp.where(number < length[..., None], found, -1)


def write_tail(
    tail: Float[Array, "B K S H"],
    new: Float[Array, "B T K H"],
    entry: Int[Array, "B T"],
    parts: int = 1,
    kernels: Kernels | None = None,
) -> Float[Array, "B K S H"]:
    """Writes entries to the tail at their numbers; numbers beyond its end are ignored."""
    slots = tail.shape[2]
    slot = jnp.where(entry < slots, slot_of(entry, 0, slots, parts), slots)
    return _write(tail, new, jnp.broadcast_to(slot[..., None], new.shape[:3]), parts, kernels)


def quantize_old(
    tail: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    seen: Int[Array, " B"],
    *,
    bits: int,
    group: int,
    window: int,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Keys and values of a tail as attention sees them if KIVI quantises what leaves its window (its Alg. 1).

    Keys leave `window` at a time, so that their groups along the slots are complete; values leave one by one.

    Args:
        tail: keys and values in full precision.
        seen: entries of each row, the new one included.
        bits: see `quantize`.
        group: likewise; divides `window`.
        window: entries in full precision.
    """
    slot = jnp.arange(tail[0].shape[2])
    old = slot < (seen // window * window)[:, None], slot < (seen - window)[:, None]
    made = []
    for x, left, axis in zip(tail, old, ("slots", "channels"), strict=True):
        used = jnp.broadcast_to(left[:, None], x.shape[:3])
        stored = dequantize(quantize(x, used, bits=bits, group=group, axis=axis))  # type: ignore[arg-type]
        made.append(jnp.where(used[..., None], stored, x))
    return made[0], made[1]


def write_pool(
    pool: Float[Array, "B #K P *H"] | Int[Array, "B #K P"],
    new: Float[Array, "B T K *H"] | Int[Array, "B T K"],
    entry: Int[Array, "B T K"],
    start: Int[Array, "B T K"],
    valid: Bool[Array, "B 1"] | None = None,
    parts: int = 1,
    kernels: Kernels | None = None,
) -> Float[Array, "B #K P *H"] | Int[Array, "B #K P"]:
    """Writes entries to segments of the pool.

    Args:
        pool: keys, values or tokens.
        new: the entries, for each key head.
        entry: number of the entry in its segment.
        start: first slot of the segment.
        valid: rows to write; None: all.
        parts: into which a mesh splits the slots.
        kernels: implementations; None: those of the platform.
    """
    slots = pool.shape[2]
    slot = slot_of(entry, start, slots, parts)
    return _write(pool, new, slot if valid is None else jnp.where(valid[..., None], slot, slots), parts, kernels)


@partial(jax.jit, static_argnums=(3, 4))  # traced once for all layers
def _write(x: Array, new: Array, slot: Int[Array, "B T K"], parts: int, kernels: Kernels | None) -> Array:
    """Writes `new` [B, T, K, ...] to slots of x [B, #K, P, ...]; slots past the end are ignored."""

    def local(part: parallel.Part, x: Array, new: Array, slot: Array) -> Array:
        slot = part.local_slot(slot, x.shape[2])
        if x.ndim == 4 and slot.shape[1] == 1:
            implementation = None if kernels is None else kernels.write_slots
            return write_slots(x, new[:, 0], slot[:, 0], implementation=implementation)
        row = jnp.arange(x.shape[0])[:, None, None]
        return x.at[row, jnp.arange(x.shape[1]), slot].set(new, mode="drop", wrap_negative_indices=False)

    pool, entries = (f"B {axes}" + " H" * (x.ndim - 3) for axes in ("K P", "T K"))
    run = parallel.split(local, (pool, entries, "B T K"), pool, batch=x.shape[0], kv_heads=x.shape[1], parts=parts)
    return run(x, new, slot)


def take_rows(cache: PackedCache, rows: Sequence[int] | Int[np.ndarray, " R"] | Int[Array, " R"]) -> PackedCache:
    """A cache with the given rows of another, in this order. Repeat a row to ask several questions about it.

    Args:
        cache: a cache of B rows.
        rows: numbers from 0 to B - 1.

    Raises:
        InputError: no rows; outside jit, also numbers out of range.
    """
    batch = cache.used.shape[0]
    if not isinstance(rows, jax.core.Tracer):
        known = np.asarray(rows)
        if known.ndim != 1 or not known.size or not np.issubdtype(known.dtype, np.integer):
            raise InputError(f"rows={rows!r} must be a list of at least one whole number")
        if known.min() < 0 or known.max() >= batch:
            raise InputError(f"rows={known.tolist()}: the cache has {batch} rows, numbered from 0")
    index = jnp.asarray(rows, jnp.int32)

    return map_with_axes(lambda x, names: jnp.take(x, index, axis=names.index("batch")), cache)


def check_new_tokens(new_tokens: int) -> None:
    """Raises InputError unless `new_tokens` is a whole number of at least 1."""
    if not (isinstance(new_tokens, int) and new_tokens >= 1):
        raise InputError(
            f"new_tokens={new_tokens!r} must be a whole number of at least 1: every new token needs a slot"
        )


def most_used(cache: PackedCache) -> int | None:
    """The largest number of new tokens of any row; None under jit, where it is unknown."""
    if isinstance(cache.used, jax.core.Tracer):
        return None
    with jax.ensure_compile_time_eval():
        return int(jnp.max(cache.used))


def resize(cache: PackedCache, new_tokens: int) -> PackedCache:
    """The cache with capacity for `new_tokens` tokens after the prompt, including those it already has.

    Budgets that depend on the number of new tokens (A-VL's text window) use the new number from now on; evicted entries
    do not return. If slots are reused, a segment gets more slots if the method's budget grows with the number of
    tokens; it never loses slots.

    Raises:
        InputError: less than 1, or less than the tokens it already has. Under jit, their number is unknown, so the
            capacity cannot decrease, and segments of a pool cannot grow.
    """
    check_new_tokens(new_tokens)
    capacity, used = cache.new_tokens, most_used(cache)
    if used is None and (new_tokens if cache.reuses else align(new_tokens, cache.parts)) < capacity:
        raise InputError(f"new_tokens={new_tokens}: under jit, a cache cannot get less than its capacity of {capacity}")
    if used is not None and new_tokens < used:
        raise InputError(f"new_tokens={new_tokens} is too small: the cache already has {used} new tokens")
    if cache.reuses:
        return _resize_pool(cache, new_tokens)

    slots, parts = align(new_tokens, cache.parts), cache.parts

    def fit(x: Float[Array, "B K S H"]) -> Float[Array, "B K _s H"]:
        x = _by_part(x, parts)[:, :, :, : slots // parts]
        more = [(0, 0), (0, 0), (0, 0), (0, slots // parts - x.shape[3]), (0, 0)]
        return jnp.pad(x, more).reshape(*x.shape[:2], slots, x.shape[4])

    states = cache.decode_states and tuple(decode_state.resize(layer, slots) for layer in cache.decode_states)
    return dataclasses.replace(
        cache, tail_k=tuple(map(fit, cache.tail_k)), tail_v=tuple(map(fit, cache.tail_v)), decode_states=states
    )


def _resize_pool(cache: PackedCache, new_tokens: int) -> PackedCache:
    """`resize` if slots are reused: moves the segments so that each has the slots that the policy needs."""
    assert cache.decode_states is not None and cache.policy is not None
    layers, parts = len(cache.decode_states), cache.parts
    states = [decode_state.resize(layer, new_tokens) for layer in cache.decode_states]
    updater = cache.policy.updater
    assert updater is not None
    if new_tokens <= cache.new_tokens or not _grows_with_new_tokens(updater):
        return dataclasses.replace(cache, decode_states=tuple(states))
    requested = jnp.stack([jax.vmap(updater.decode_slots)(layer) for layer in states])
    if isinstance(requested, jax.core.Tracer):
        raise InputError("the number of slots that the method needs is unknown under jit: resize the cache outside jit")
    length, columns = jnp.maximum(cache.length, requested), cache.token.shape[1]
    before, after = (align(-(-x // parts)) for x in (cache.length, length))  # in each part
    start, end = _before(after, columns), jnp.sum(_by_column(after, columns), axis=0)
    # Grows by whole tiles of all layers, so that few sizes must be compiled.
    here = cache.token.shape[2] // parts
    here += align(max(0, int(jnp.max(end)) - here), layers * ALIGNMENT)
    most = max(int(jnp.max(requested)), cache.decode_states[0].stored.shape[-1])
    more = align(most) - cache.decode_states[0].stored.shape[-1]
    states = [decode_state.resize(layer, new_tokens, more) for layer in cache.decode_states]
    states = [dataclasses.replace(layer, slots=length[i]) for i, layer in enumerate(states)]
    first, filled, old = (_by_column(x, columns) for x in (start, before, cache.start))
    place = jnp.arange(here)[:, None, None, None] - first  # [slots of a part, segments, B, #K], within each segment
    source = jnp.max(jnp.where((place >= 0) & (place < filled), place + old, -1), axis=1)
    source = jnp.moveaxis(source, 0, 2)[:, :, None]  # [B, #K, 1, slots of a part]

    def move(x: Array, fill: int) -> Array:
        split = _by_part(x, parts)
        where = source.reshape(*source.shape, *(1,) * (split.ndim - source.ndim))
        moved = jnp.where(where >= 0, jnp.take_along_axis(split, jnp.maximum(where, 0), axis=3), fill)
        return moved.reshape(*x.shape[:2], -1, *x.shape[3:]).astype(x.dtype)

    assert not isinstance(cache.k, QuantizedPool) and not isinstance(cache.v, QuantizedPool)
    return dataclasses.replace(
        cache, k=move(cache.k, 0), v=move(cache.v, 0), token=move(cache.token, -1), start=start, length=length,
        decode_states=tuple(states),
    )  # fmt: skip


def _by_part(x: Array, parts: int) -> Array:
    """Splits the slots [B, K, P, ...] of a pool or tail into those of each part [B, K, parts, P / parts, ...]."""
    return x.reshape(*x.shape[:2], parts, -1, *x.shape[3:])


def _by_column(x: Int[Array, "L B K"], columns: int) -> Int[Array, "segments B #K"]:
    """Numbers of the segments in their order in each column of the pool."""
    layers, batch, _ = x.shape
    return jnp.moveaxis(x.reshape(layers, batch, -1, columns), 2, 1).reshape(-1, batch, columns)


def _before(x: Int[Array, "L B K"], columns: int) -> Int[Array, "L B K"]:
    """For every segment, the sum of x over the segments before it in its column."""
    (layers, batch, heads), each = x.shape, _by_column(x, columns)
    sums = (jnp.cumsum(each, axis=0) - each).reshape(layers, -1, batch, columns)
    return jnp.moveaxis(sums, 1, 2).reshape(layers, batch, heads)


def _grows_with_new_tokens(updater: DecodingStages) -> bool:
    """Whether the method needs more slots for more new tokens."""
    few, many = (updater.decode_bounds(1, 1, layers=1, vision=0, text=1, new_tokens=n) for n in (0, 2**16))
    return many > few


def align(n: Any, tile: int = ALIGNMENT) -> Any:
    """Rounds up to a multiple of `tile`."""
    return -(-n // tile) * tile


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """What a policy needs of a cache, for prompts of at most given numbers of tokens. It is static under jit.

    Slots are per key head, without the alignment of segments. If new entries take free slots, these are included.
    """

    layers: int
    slots: int  # of the segments of all layers together
    longest: int  # of the segment of one layer
    limit: int  # `longest`, or without `reuses`: of one layer if the budget could be divided in any way
    new_tokens: int  # capacity for new tokens
    reuses: bool  # whether new entries take free slots instead of a tail
    per_head: bool  # as in `Policy`
    storage: Storage | None  # as in `Policy`
    softmax_n: float  # as in `Policy`

    def columns(self, kv_heads: int) -> int:
        """Columns of the pool (`#K`): one if all heads share it."""
        return 1 if self.per_head else kv_heads

    @property
    def tile(self) -> int:
        """Alignment of segments, chosen so that no group of quantised keys belongs to two layers."""
        return ALIGNMENT if self.storage is None else math.lcm(ALIGNMENT, self.storage.group)

    def pool(self, parts: int) -> int:
        """Slots of the pool per key head, with the alignment of segments in every part.

        Without `reuses`, methods with the same total have pools of the same size, so that comparisons are fair. A
        method with `per_head` may need one tile more.
        """
        slots = (self.slots + self.layers * (parts - 1)) // parts  # of a part, which may have one more per segment
        slots += self.layers * (self.tile - 1)  # alignment adds at most these
        # A segment fills whole tiles, so a last, incomplete tile is useless, except if heads share a column.
        slots = align(slots, self.tile) if self.per_head else slots // self.tile * self.tile
        return parts * max(self.tile, min(slots, self.layers * align(-(-self.limit // parts), self.tile)))

    def tail(self, parts: int) -> int:
        """Slots of the tail of one layer."""
        return 0 if self.reuses else align(self.new_tokens, parts)


def pool_slots(
    policy: Policy, inputs: Inputs | None = None, *, layers: int, new_tokens: int = 64, vision: int = 0, text: int = 0,
    images: int = 1, parts: int = 1,
) -> int:  # fmt: skip
    """Slots that a cache allocates per row and key head, in the pool and the tails of all layers.

    Args:
        policy: determines how many entries may be kept.
        inputs: prompts, whose bounds are used; None: the bounds are the next three arguments.
        layers: L, `len(params.decoder.layers)`.
        new_tokens: capacity for generated tokens.
        vision: bound on the vision tokens of a row (`Inputs.max_vision`).
        text: bound on its text tokens (`Inputs.max_text`).
        images: bound on its images (`Inputs.max_images`).
        parts: M: 1, or the size of the mesh's `model` axis if it does not divide the columns of the pool: the key
            heads, or 1 with `Policy.per_head`.

    Raises:
        InputError: `inputs` of another type.
    """
    if inputs is not None and not isinstance(inputs, Inputs):
        raise InputError("inputs are not vlkv.Inputs: convert a Hugging Face batch by vlkv.Inputs.from_hf")
    if inputs is not None:
        vision, text, images = inputs.max_vision, inputs.max_text, inputs.max_images
    spec = cache_spec(policy, layers=layers, vision=vision, text=text, images=images, new_tokens=new_tokens)
    return spec.pool(parts) + layers * spec.tail(parts)


def cache_spec(policy: Policy, *, layers: int, vision: int, text: int, images: int, new_tokens: int) -> CacheSpec:
    """What the policy needs of a cache; arguments as in `pool_slots`."""
    slots = total_bound(policy, layers=layers, vision=vision, text=text, images=images)
    # The default `allocate` gives equal budgets to layers with the same number of tokens.
    equal = type(policy.allocator).allocate is Policy.allocate and policy.reducer is None
    limit = vision + text
    longest = -(-slots // layers) if equal else limit
    # An evicted entry frees its slot, unless the pool is quantised, because slots share scales.
    reuses = False
    if policy.storage is None and (updater := policy.updater) is not None and updater.evicts:
        reuses = True
        slots, longest = updater.decode_bounds(
            slots, longest, layers=layers, vision=vision, text=text, new_tokens=new_tokens
        )
        limit = longest
    return CacheSpec(
        layers=layers, slots=slots, longest=longest, limit=limit, new_tokens=new_tokens, reuses=reuses,
        per_head=policy.per_head, storage=policy.storage, softmax_n=policy.softmax_n,
    )  # fmt: skip


def total_bound(policy: Policy, *, layers: int, vision: int, text: int, images: int = 1) -> int:
    """Bound on the entries of all layers together, for prompts of at most these tokens; out of scope included."""
    text_in_scope, text_kept = (layers * text, 0) if policy.scope == "all" else (0, layers * text)
    if policy.reducer is None or policy.counts_dropped:
        sums = np.arange(0, layers * vision + text_in_scope + 1, layers)
    else:
        sums = np.arange(sum(vision_bounds(policy, layers=layers, vision=vision, images=images)) + text_in_scope + 1)
    return int(np.max(policy.totals(sums, layers=layers, text=text))) + text_kept


def vision_bounds(policy: Policy, *, layers: int, vision: int, images: int) -> tuple[int, ...]:
    """Bound on the vision tokens of each layer, before tokens are selected."""
    reducer, left = policy.reducer, [vision]
    if reducer is None:
        return (vision,) * layers
    after = reducer.reductions(layers)
    for stage in range(len(after)):
        left.append(min(left[-1], reducer.remaining(stage=stage, vision=left[-1], images=images)))
    if reducer.drops_early_layers:
        return (left[-1],) * layers
    return tuple(left[sum(i >= a for a in after)] for i in range(layers))


def pack(
    spec: CacheSpec,
    k: tuple[Float[Array, "B K _t H"], ...],
    v: tuple[Float[Array, "B K _t H"], ...],
    kept: Bool[Array, "L B K T"],
    *,
    is_vision: Bool[Array, "L B T"],
    source: Int[Array, "L B T"],
    next_position: Int[Array, "B A"],
    requested: Int[Array, "L B K"] | None = None,
) -> PackedCache:
    """Moves the kept entries of all layers into one pool.

    If the pool is quantised, the tail is in full precision; see `quantize_old` for what attention sees of it.

    Args:
        spec: from `cache_spec`.
        k: one per layer; a layer with fewer tokens has a shorter array.
        v: as k.
        kept: tokens that each layer keeps, padded to the longest layer, like the next two.
        is_vision: which tokens come from an image.
        source: index of each token in the prompt.
        next_position: as in `PackedCache`.
        requested: slots that the policy requests for each segment if slots are reused, else None. A segment gets at
            least one slot more than its entries. If the sum exceeds the pool, upper layers get fewer slots; this may
            happen if a short prompt keeps more than the policy's share.
    """
    layers, (batch, heads, _, head_dim) = len(k), k[0].shape
    columns = spec.columns(heads)
    parts, tile = parallel.slot_parts(columns), spec.tile
    window = None if spec.storage is None else spec.storage.window
    if parts > 1 and window is not None:
        raise InputError(f"window={window} needs a mesh whose `model` axis divides the {columns} columns of the pool")
    slots, total = (n * heads // columns for n in (spec.pool(parts), spec.slots))  # of a column
    counts = jnp.sum(kept, axis=-1, dtype=jnp.int32)  # [L, B, K]
    granted = counts  # slots of each segment
    if requested is not None:
        least = counts + 1
        spare = jnp.clip(jnp.minimum(requested, spec.longest) - least, 0)
        free = jnp.maximum(total - jnp.sum(_by_column(least, columns), axis=0), 0)
        granted = least + jnp.clip(spare, 0, jnp.maximum(free - _before(spare, columns), 0))

    def local(
        part: parallel.Part, k: Any, v: Any, kept: Any, granted: Any, is_vision: Any, source: Any
    ) -> tuple[Any, ...]:
        """Packs this device's rows, heads and slots."""
        (_, rows, own_heads, length), here = kept.shape, slots // parts
        own_columns = own_heads if columns == heads else 1
        counts = jnp.sum(kept, axis=-1, dtype=jnp.int32)
        rounded, filled = align(-(-granted // parts), tile), align(-(-counts // parts), tile)
        start = _before(rounded, own_columns)

        def find(layer: tuple[Any, Any, Any]) -> Int[Array, "B K T"]:
            """The token of each slot of a layer's segment."""
            kept, is_vision, start = layer
            entry = _vision_first(kept, is_vision[:, None])
            slot = part.local_slot(slot_of(entry, start[..., None], slots, parts), here)
            place = jnp.where(kept & (slot < here), slot - start[..., None], length)
            return jax.vmap(jax.vmap(partial(tokens_at, places=length)))(place)

        order = jax.lax.map(find, (kept, is_vision, start))  # a loop is compiled once for all layers
        pools: tuple[Array, ...] = (
            *(jnp.zeros((rows, own_columns, here, head_dim), k[0].dtype) for _ in "kv"),
            jnp.full((rows, own_columns, here), -1, jnp.int32),
        )
        for layer in range(layers):
            values = k[layer], v[layer], source[layer].astype(jnp.int32)
            pools = _write_segments(pools, values, order[layer], start[layer], start[layer] + filled[layer])
        pool_k, pool_v, token = pools

        def tail() -> tuple[Array, ...]:  # called twice, because shared buffers cannot be donated
            shape = rows, own_heads, spec.tail(parts) // parts, head_dim
            return tuple(jnp.zeros(shape, k[0].dtype) for _ in range(0 if spec.reuses else layers))

        packed_k: Array | QuantizedPool = pool_k
        packed_v: Array | QuantizedPool = pool_v
        if spec.storage is not None:
            bits, group, _ = spec.storage
            packed_k = quantize(pool_k, token >= 0, bits=bits, group=group, axis="slots")
            packed_v = quantize(pool_v, token >= 0, bits=bits, group=group, axis="channels")
        return packed_k, packed_v, token, start, tail(), tail()

    pool, each = "B K P H", "L B K"
    run = parallel.split(
        local, ("B K T H", "B K T H", "L B K T", each, "L B T", "L B T"), (pool, pool, "B K P", each, pool, pool),
        batch=batch, kv_heads=heads, parts=parts,
    )  # fmt: skip
    packed_k, packed_v, token, start, tail_k, tail_v = run(k, v, kept, granted, is_vision, source)
    return PackedCache(
        k=packed_k, v=packed_v, token=token, start=start, length=granted, tail_k=tail_k, tail_v=tail_v,
        used=jnp.zeros(batch, jnp.int32), next_position=next_position, softmax_n=spec.softmax_n, parts=parts,
        window=window,
    )  # fmt: skip


def _vision_first(kept: Bool[Array, "B K T"], is_vision: Bool[Array, "B 1 T"]) -> Int[Array, "B K T"]:
    """The number of each kept token in its segment: vision tokens first, then text."""
    vision, text = kept & is_vision, kept & ~is_vision
    after = jnp.sum(vision, axis=-1, keepdims=True)
    return jnp.where(vision, jnp.cumsum(vision, axis=-1) - 1, after + jnp.cumsum(text, axis=-1) - 1)


def _write_segments(
    pools: tuple[Float[Array, "B #K P *H"] | Int[Array, "B #K P"], ...],
    values: tuple[Float[Array, "B K _t H"] | Int[Array, "B T"], ...],
    order: Int[Array, "B K T"],
    start: Int[Array, "B K"],
    end: Int[Array, "B K"],
) -> tuple[Array, ...]:
    """Writes a layer's segments: the values of the tokens in `order`, up to the first -1, to the slots from `start` on.

    It writes one window of slots of all columns at a time, beginning at the first new slot of a row. One scatter of all
    values would be slow, because XLA for TPU sorts its indices, and a scatter per head transposes the pool twice.
    """
    rows, heads, tokens = order.shape
    columns, slots = pools[0].shape[1:3]
    groups = heads // columns  # of heads in different columns, which are written together
    first_head, column = jnp.arange(groups) * columns, jnp.arange(columns)
    low, high = jnp.min(start.reshape(rows, groups, -1), axis=2), jnp.max(end.reshape(rows, groups, -1), axis=2)
    size = min(_SLOTS_AT_A_TIME, slots)
    windows = jnp.max(-(-(high - low) // size))  # of the longest one

    def take(x: Array, where: tuple[Array, ...]) -> Array:
        return x.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def step(i: Int[Array, ""], pools: tuple[Array, ...]) -> tuple[Array, ...]:
        segment = jax.lax.div(i, windows)  # `//` would need ten operations, because it handles signs
        row, group = jax.lax.div(segment, groups), jax.lax.rem(segment, groups)
        head = first_head[group] + column
        first = jnp.minimum(low[row, group] + jax.lax.rem(i, windows) * size, slots - size)
        entry = first + jnp.arange(size) - start[row, head][:, None]  # [#K, slots of the window]
        named = take(order, (row, head[:, None], jnp.clip(entry, 0, tokens - 1)))
        is_new = (entry >= 0) & (entry < tokens) & (named >= 0)
        named = jnp.maximum(named, 0)

        def write(pool: Array, values: Array) -> Array:
            window = (row, 0, first) + (0,) * (pool.ndim - 3)
            sizes = (1, columns, size, *pool.shape[3:])
            old = jax.lax.dynamic_slice(pool, window, sizes, allow_negative_indices=False)[0]
            new = take(values, (row, head[:, None], named) if values.ndim > 2 else (row, named))
            new = jnp.where(is_new.reshape(columns, size, *[1] * (pool.ndim - 3)), new, old)
            return jax.lax.dynamic_update_slice(pool, new[None], window, allow_negative_indices=False)

        return tuple(map(write, pools, values))

    return jax.lax.fori_loop(0, rows * groups * windows, step, pools)
