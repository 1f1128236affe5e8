"""The packed cache: kept prompt entries of all layers in one pool, generated tokens in a tail.

Axes: B batch · L layers · K key heads · T prompt tokens · P pool slots · S tail slots · H head dim · A position axes ·
M parts of the slots. A slot is where an entry lies; a position is what RoPE saw. Budgets that differ per layer and per
row have a fixed sum, so a pool wastes nothing where L padded rectangles would. On a mesh whose `model` axis does not
divide the key heads, pool and tail are in M equal parts, one after the other, and every M-th entry goes to the same
one: `slot_of` says where an entry lies, whatever M is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Kernels, QuantizedPool, quantize
from vlkv import memory, parallel
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.memory import Memory
from vlkv.observe import tokens_at
from vlkv.policies.policy import Policy

ALIGNMENT = 16  # slots: every segment starts on a bf16 tile
_SLOTS_AT_A_TIME = 512  # that are written


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCache:
    """A compressed cache during decoding. The pool is read-only; the tail grows by one slot per token."""

    k: Float[Array, "B P K H"] | QuantizedPool
    v: Float[Array, "B P K H"] | QuantizedPool
    token: Int[Array, "B P K"]  # which prompt token lies in each slot; -1: free
    start: Int[Array, "L B K"]  # first slot of each layer's segment, in each part
    length: Int[Array, "L B K"]  # slots in use, of all parts: vision entries first, then text
    tail_k: tuple[Float[Array, "B S K H"], ...]  # one per layer
    tail_v: tuple[Float[Array, "B S K H"], ...]
    used: Int[Array, " B"]  # tail slots in use
    next_position: Int[Array, "B A"]  # logical: counts every token ever seen
    memory: tuple[Memory, ...] | None = None  # one per layer, of methods that act while decoding
    policy: Policy | None = dataclasses.field(default=None, metadata={"static": True})  # the one that acts
    softmax_n: float = dataclasses.field(default=0.0, metadata={"static": True})  # of decode attention
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    parts: int = dataclasses.field(default=1, metadata={"static": True})  # M

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, as allocated."""
        return sum(x.nbytes for x in (self.k, self.v, *self.tail_k, *self.tail_v))


def slot_of(entry: Any, start: Any, slots: int, parts: int) -> Any:
    """In which of so many slots entry number `entry` of a segment, or of a tail (start 0), lies."""
    if parts == 1:
        return start + entry
    return entry % parts * (slots // parts) + start + entry // parts


def entries(
    token: Int[Array, "B P K"], start: Int[Array, "B K"], length: Int[Array, "B K"], most: int, parts: int = 1
) -> Int[Array, "B K M"]:
    """Which prompt token each of the first `most` entries of a layer's segment is, in their order; -1: no entry.

    Args:
        token: of a `PackedCache` or an `Output`, as are start and length, of one layer.
        start: see there.
        length: see there.
        most: a bound on the entries.
        parts: see there.
    """
    number = jnp.arange(most)
    slot = slot_of(number, start[..., None], token.shape[1], parts)
    found = jnp.take_along_axis(jnp.swapaxes(token, 1, 2), slot, axis=2, mode="clip")
    return jnp.where(number < length[..., None], found, -1)


def write(
    tail: Float[Array, "B S K H"], new: Float[Array, "B T K H"], entry: Int[Array, "B T"], parts: int = 1
) -> Float[Array, "B S K H"]:
    """The tail with new entries in it, by their numbers; what lies past its end is not written."""
    slots = tail.shape[1]

    def own(part: parallel.Part, tail: Array, new: Array, entry: Array) -> Array:
        slot = jnp.where(entry < slots, slot_of(entry, 0, slots, parts), slots)
        row = jnp.arange(tail.shape[0])[:, None]
        return tail.at[row, part.local(slot, tail.shape[1])].set(new, mode="drop", wrap_negative_indices=False)

    batch, kv_heads = tail.shape[0], tail.shape[2]
    run = parallel.split(
        own, ("B P K H", "B T K H", "B T"), "B P K H", batch=batch, kv_heads=kv_heads, parts=parts
    )  # fmt: skip
    return run(tail, new, entry)


def take_rows(cache: PackedCache, rows: Sequence[int] | Int[np.ndarray, " R"] | Int[Array, " R"]) -> PackedCache:
    """A cache with these rows of another, in this order; a row named several times serves several questions.

    Args:
        cache: of B rows.
        rows: which of them, each from 0 to B - 1.

    Raises:
        InputError: no rows, or, where the numbers are known (under jit they are not), one that there is not.
    """
    batch = cache.used.shape[0]
    if not isinstance(rows, jax.core.Tracer):
        known = np.asarray(rows)
        if known.ndim != 1 or not known.size or not np.issubdtype(known.dtype, np.integer):
            raise InputError(f"rows={rows!r} must be a list of at least one whole number")
        if known.min() < 0 or known.max() >= batch:
            raise InputError(f"rows={known.tolist()}: the cache has {batch} rows, counted from 0")
    index = jnp.asarray(rows, jnp.int32)

    def take(path: tuple[Any, ...], x: Array) -> Array:
        return jnp.take(x, index, axis=1 if path[0].name in ("start", "length") else 0)  # layers come first in these

    return jax.tree_util.tree_map_with_path(take, cache)


def check_new_tokens(new_tokens: int) -> None:
    """Raises InputError unless a tail can have so many slots."""
    if not (isinstance(new_tokens, int) and new_tokens >= 1):
        raise InputError(
            f"new_tokens={new_tokens!r} must be a whole number of at least 1: every new token needs a slot"
        )


def most_used(cache: PackedCache) -> int | None:
    """Used tail slots of the fullest row; None under jit, where it is unknown."""
    if isinstance(cache.used, jax.core.Tracer):
        return None
    with jax.ensure_compile_time_eval():
        return int(jnp.max(cache.used))


def resize_tail(cache: PackedCache, new_tokens: int) -> PackedCache:
    """The same cache with a tail of `new_tokens` slots: room for more turns, or none to spare.

    Methods whose budgets count the tokens that may follow (A-VL's text window) count the new number from here on; what
    they have let go before stays away.

    Raises:
        InputError: no slot, or fewer than are in use. Under jit, where that is unknown, a tail can only grow.
    """
    check_new_tokens(new_tokens)
    room, used = cache.tail_k[0].shape[1], most_used(cache)
    used = room if used is None else used
    if new_tokens < used:
        raise InputError(f"new_tokens={new_tokens} is too few: the tail's {used} slots in use would be cut off")

    slots, parts = align(new_tokens, cache.parts), cache.parts

    def resize(x: Float[Array, "B S K H"]) -> Float[Array, "B _s K H"]:
        x = x.reshape(x.shape[0], parts, room // parts, *x.shape[2:])[:, :, : slots // parts]
        more = [(0, 0), (0, 0), (0, slots // parts - x.shape[2]), (0, 0), (0, 0)]
        return jnp.pad(x, more).reshape(x.shape[0], slots, *x.shape[3:])

    memories = None if cache.memory is None else tuple(memory.resize(layer, slots) for layer in cache.memory)
    return dataclasses.replace(
        cache, tail_k=tuple(map(resize, cache.tail_k)), tail_v=tuple(map(resize, cache.tail_v)), memory=memories
    )


def align(n: Any, tile: int = ALIGNMENT) -> Any:
    """Rounds up to a whole number of tiles."""
    return -(-n // tile) * tile


def pool_slots(
    policy: Policy, inputs: Inputs | None = None, *, layers: int, new_tokens: int = 64, vision: int = 0, text: int = 0,
    images: int = 1, parts: int = 1,
) -> int:  # fmt: skip
    """Slots that a cache allocates per row and key head: the pool, and the tails of all layers.

    Args:
        policy: decides how many entries may be kept.
        inputs: prompts; their bounds are used. None: the next three are.
        layers: L, `len(params.decoder.layers)`.
        new_tokens: tokens to be generated.
        vision: bound on the vision tokens of a row (`Inputs.max_vision`).
        text: bound on its text tokens (`Inputs.max_text`).
        images: bound on its images (`Inputs.max_images`).
        parts: of the slots, all counted: 1 unless `model` of the mesh does not divide the key heads; then its size.
    """
    if inputs is not None:
        vision, text, images = inputs.max_vision, inputs.max_text, inputs.max_images
    return _pool(policy, layers, vision, text, images, parts) + layers * align(new_tokens, parts)


def _pool(policy: Policy, layers: int, vision: int, text: int, images: int, parts: int) -> int:
    # In every part a segment may waste up to a tile less one slot; it can never waste more than a whole row would.
    kept, tile = policy.bound(layers=layers, vision=vision, text=text, images=images), _tile(policy)
    most = (kept + layers * (parts - 1)) // parts  # of the first part, which has one more where a segment is odd
    return parts * align(min(most + layers * (tile - 1), layers * align(-(-(vision + text) // parts), tile)), tile)


def _tile(policy: Policy) -> int:
    """Slots that a segment is rounded up to: no group of quantised keys reaches into two layers."""
    return ALIGNMENT if policy.storage is None else math.lcm(ALIGNMENT, policy.storage.group)


def pack(
    policy: Policy,
    k: tuple[Float[Array, "B K _t H"], ...],
    v: tuple[Float[Array, "B K _t H"], ...],
    kept: Bool[Array, "L B K T"],
    *,
    is_vision: Bool[Array, "L B T"],
    source: Int[Array, "L B T"],
    next_position: Int[Array, "B A"],
    max_vision: int,
    max_text: int,
    max_images: int,
    new_tokens: int,
) -> PackedCache:
    """Moves the kept entries of all layers into one pool.

    Where the policy quantises the pool, the tail stays as it comes: it is KIVI's recent window in full precision.

    Args:
        policy: any policy.
        k: of each layer; one that holds fewer tokens has shorter arrays.
        v: likewise.
        kept: which tokens each layer keeps, padded to the longest layer, as are the next two.
        is_vision: which come from an image.
        source: which token of the prompt each is.
        next_position: see `PackedCache`.
        max_vision: see `pool_slots`, as the other bounds.
        max_text: text tokens.
        max_images: images.
        new_tokens: slots of the tail.
    """
    layers, (batch, heads, _, head_dim) = len(k), k[0].shape
    parts, tile = parallel.slot_parts(heads), _tile(policy)
    slots = _pool(policy, layers, max_vision, max_text, max_images, parts)

    def own(part: parallel.Part, k: Any, v: Any, kept: Any, is_vision: Any, source: Any) -> tuple[Any, ...]:
        """A device's rows, heads and slots."""
        (_, rows, own_heads, length), here = kept.shape, slots // parts
        counts = jnp.sum(kept, axis=-1, dtype=jnp.int32)  # [L, B, K]
        rounded = align(-(-counts // parts), tile)
        start = jnp.cumsum(rounded, axis=0) - rounded

        def find(layer: tuple[Any, Any, Any]) -> Int[Array, "B K T"]:
            """Which token comes where in a layer's segment."""
            kept, is_vision, start = layer
            entry = _vision_first(kept, is_vision[:, None])
            slot = part.local(slot_of(entry, start[..., None], slots, parts), here)
            place = jnp.where(kept & (slot < here), slot - start[..., None], length)
            return jax.vmap(jax.vmap(partial(tokens_at, places=length)))(place)

        order = jax.lax.map(find, (kept, is_vision, start))  # a loop: it is compiled once for all layers
        low, end = jnp.min(start, axis=2), jnp.max(start + rounded, axis=2)
        windows = jnp.max(-(-(end - low) // _window(here)), axis=1)  # in the longest row
        pools: tuple[Array, ...] = (
            *(jnp.zeros((rows, here, own_heads, head_dim), k[0].dtype) for _ in "kv"),
            jnp.full((rows, here, own_heads), -1, jnp.int32),
        )
        for layer in range(layers):
            values = k[layer], v[layer], source[layer].astype(jnp.int32)
            pools = _lay(pools, values, order[layer], start[layer], low[layer], windows[layer])
        pool_k, pool_v, token = pools

        def tail() -> tuple[Array, ...]:  # twice: buffers that are shared could not be donated
            shape = rows, -(-new_tokens // parts), own_heads, head_dim
            return tuple(jnp.zeros(shape, k[0].dtype) for _ in range(layers))

        packed_k: Array | QuantizedPool = pool_k
        packed_v: Array | QuantizedPool = pool_v
        if policy.storage is not None:
            bits, group = policy.storage
            packed_k = quantize(pool_k, token >= 0, bits=bits, group=group, axis="slots")
            packed_v = quantize(pool_v, token >= 0, bits=bits, group=group, axis="channels")
        return packed_k, packed_v, token, start, counts, tail(), tail()

    pool, table = "B P K H", "L B K"
    run = parallel.split(
        own, ("B K T H", "B K T H", "L B K T", "L B T", "L B T"), (pool, pool, "B P K", table, table, pool, pool),
        batch=batch, kv_heads=heads, parts=parts,
    )  # fmt: skip
    packed_k, packed_v, token, start, length, tail_k, tail_v = run(k, v, kept, is_vision, source)
    return PackedCache(
        k=packed_k, v=packed_v, token=token, start=start, length=length, tail_k=tail_k, tail_v=tail_v,
        used=jnp.zeros(batch, jnp.int32), next_position=next_position, softmax_n=policy.softmax_n, parts=parts,
    )  # fmt: skip


def _vision_first(kept: Bool[Array, "B K T"], is_vision: Bool[Array, "B 1 T"]) -> Int[Array, "B K T"]:
    """The place of each kept token within its segment."""
    vision, text = kept & is_vision, kept & ~is_vision
    after = jnp.sum(vision, axis=-1, keepdims=True)
    return jnp.where(vision, jnp.cumsum(vision, axis=-1) - 1, after + jnp.cumsum(text, axis=-1) - 1)


def _window(slots: int) -> int:
    return min(_SLOTS_AT_A_TIME, slots)


def _lay(
    pools: tuple[Float[Array, "B P K *H"] | Int[Array, "B P K"], ...],
    values: tuple[Float[Array, "B K _t H"] | Int[Array, "B T"], ...],
    order: Int[Array, "B K T"],
    start: Int[Array, "B K"],
    low: Int[Array, " B"],
    windows: Int[Array, ""],
) -> tuple[Array, ...]:
    """The pools with one more segment: from `start` the values of the tokens that `order` names, up to the first -1.

    One window of slots at a time, all heads together, from the first slot that is new in a row (`low`). XLA for TPU
    sorts the slots that one scatter of all values is given, and where a head comes after the other it turns the pool
    around for it and back.
    """
    rows, heads, tokens = order.shape
    slots = pools[0].shape[1]
    size, head = _window(slots), jnp.arange(heads)

    def take(x: Array, where: tuple[Array, ...]) -> Array:
        return x.at[where].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def step(i: Int[Array, ""], pools: tuple[Array, ...]) -> tuple[Array, ...]:
        row = jax.lax.div(i, windows)  # not //, which minds signs in ten operations
        first = jnp.minimum(low[row] + jax.lax.rem(i, windows) * size, slots - size)
        entry = first + jnp.arange(size)[:, None] - start[row]
        named = take(order, (row, head, jnp.clip(entry, 0, tokens - 1)))
        is_new = (entry >= 0) & (entry < tokens) & (named >= 0)
        named = jnp.maximum(named, 0)

        def lay(pool: Array, values: Array) -> Array:
            window = (row, first) + (0,) * (pool.ndim - 2)
            old = jax.lax.dynamic_slice(pool, window, (1, size, *pool.shape[2:]), allow_negative_indices=False)[0]
            new = take(values, (row, head, named) if values.ndim > 2 else (row, named))
            new = jnp.where(is_new.reshape(size, heads, *[1] * (pool.ndim - 3)), new, old)
            return jax.lax.dynamic_update_slice(pool, new[None], window, allow_negative_indices=False)

        return tuple(map(lay, pools, values))

    return jax.lax.fori_loop(0, rows * windows, step, pools)
