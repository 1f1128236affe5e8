"""Changes the capacity of a cache for new tokens.

Axes: as in `pool.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels import Quantized
from vlkv.cache import decode_state, rings
from vlkv.cache.decode_state import Updater
from vlkv.cache.packing import ALIGNMENT, align, by_column, sum_before
from vlkv.cache.pool import PackedCache, checked_new_tokens, most_used
from vlkv.errors import InputError


def resize(cache: PackedCache, new_tokens: int) -> PackedCache:
    """The cache with capacity for `new_tokens` tokens after the prompt, including those it already has.

    Budgets that depend on the number of new tokens (A-VL's text window) use the new number from now on; evicted entries
    do not return. If slots are reused, a segment gets more slots if the method's budget grows with the number of
    tokens; it never loses slots. If entries are selected again, only the ids that rules read get more capacity.

    Raises:
        InputError: less than 1, or less than the tokens it already has. Under jit, their number is unknown, so the
            capacity cannot decrease, and segments of a pool cannot grow.
    """
    new_tokens = checked_new_tokens(new_tokens)
    if cache.reselection is not None:  # only the ids of the tokens grow
        size = cache.reselection.prompt + new_tokens + 1
        most = 0 if cache.history is None else max(0, size - cache.history.shape[1])
        return dataclasses.replace(cache, history=lengthened(cache.history, most))
    capacity, used = cache.new_tokens, most_used(cache)
    if used is None and (new_tokens if cache.reuses else align(new_tokens, cache.parts)) < capacity:
        raise InputError(f"new_tokens={new_tokens}: under jit, a cache cannot get less than its capacity of {capacity}")
    if used is not None and new_tokens < used:
        raise InputError(f"new_tokens={new_tokens} is too small: the cache already has {used} new tokens")
    ids = lengthened(cache.history, align(new_tokens, cache.parts) - capacity)
    cache = dataclasses.replace(cache, history=ids)
    resized = _resize_pool(cache, new_tokens) if cache.reuses else _resize_tails(cache, new_tokens)
    # The rings last: `PackedCache.new_tokens` is theirs, and the others need the old number.
    return resized if cache.rings is None else dataclasses.replace(resized, rings=rings.resize(cache.rings, new_tokens))


def lengthened(history: Int[Array, "B S"] | None, more: int) -> Int[Array, "B S+more"] | None:
    """`PackedCache.history` with capacity for `more` ids; less capacity if the number is negative. None stays None."""
    if history is None:
        return None
    padded = jnp.pad(history, ((0, 0), (0, max(more, 0))), constant_values=-1)
    return padded[:, : history.shape[1] + more]


def _resize_tails(cache: PackedCache, new_tokens: int) -> PackedCache:
    """`resize` if new tokens go to tails."""
    slots, parts = align(new_tokens, cache.parts), cache.parts

    def fit(x: Shaped[Array, "B K L S H"]) -> Shaped[Array, "B K L _s H"]:
        x = x.reshape(*x.shape[:3], parts, -1, x.shape[4])[..., : slots // parts, :]
        more = [*[(0, 0)] * 4, (0, slots // parts - x.shape[4]), (0, 0)]
        return jnp.pad(x, more).reshape(*x.shape[:3], slots, x.shape[5])

    states = None if cache.decode_states is None else decode_state.resize(cache.decode_states, slots)
    return dataclasses.replace(
        cache, tail_k=jax.tree.map(fit, cache.tail_k), tail_v=jax.tree.map(fit, cache.tail_v), decode_states=states
    )


def _resize_pool(cache: PackedCache, new_tokens: int) -> PackedCache:
    """`resize` if slots are reused: moves the segments so that each has the slots that the policy needs."""
    assert cache.decode_states is not None and cache.policy is not None
    layers, parts = len(cache.start), cache.parts
    states = decode_state.resize(cache.decode_states, new_tokens)
    updater = cache.policy
    if new_tokens <= cache.new_tokens or not _grows_with_new_tokens(updater):
        return dataclasses.replace(cache, decode_states=states)
    requested = jax.vmap(jax.vmap(updater.decode_slots))(states)
    if isinstance(requested, jax.core.Tracer):
        raise InputError("the number of slots that the method needs is unknown under jit: resize the cache outside jit")
    extent, columns = jnp.maximum(cache.extent, requested), cache.token.shape[1]
    before, after = (align(-(-x // parts)) for x in (cache.extent, extent))  # in each part
    start, end = sum_before(after, columns), jnp.sum(by_column(after, columns), axis=0)
    # Grows by whole tiles of all layers, so that few sizes must be compiled.
    here = cache.token.shape[2] // parts
    here += align(max(0, int(jnp.max(end)) - here), layers * ALIGNMENT)
    size = cache.decode_states.stored.shape[-1]
    more = align(max(int(jnp.max(requested)), size)) - size
    # A cache that contains an array twice could not be donated.
    states = dataclasses.replace(decode_state.resize(cache.decode_states, new_tokens, more), slots=jnp.copy(extent))
    first, filled, old = (by_column(x, columns) for x in (start, before, cache.start))
    place = jnp.arange(here)[:, None, None, None] - first  # [slots of a part, segments, B, #K], within each segment
    source = jnp.max(jnp.where((place >= 0) & (place < filled), place + old, -1), axis=1)
    source = jnp.moveaxis(source, 0, 2)[:, :, None]  # [B, #K, 1, slots of a part]

    def move(x: Array, fill: int) -> Array:
        split = _by_part(x, parts)
        where = source.reshape(*source.shape, *(1,) * (split.ndim - source.ndim))
        moved = jnp.where(where >= 0, jnp.take_along_axis(split, jnp.maximum(where, 0), axis=3), fill)
        return moved.reshape(*x.shape[:2], -1, *x.shape[3:]).astype(x.dtype)

    assert not isinstance(cache.k, Quantized) and not isinstance(cache.v, Quantized)
    return dataclasses.replace(
        cache, k=move(cache.k, 0), v=move(cache.v, 0), token=move(cache.token, -1), start=start, extent=extent,
        decode_states=states, longest=None,
    )  # fmt: skip


def _by_part(x: Array, parts: int) -> Array:
    """Splits the slots [B, K, P, ...] of a pool or tail into those of each part [B, K, parts, P / parts, ...]."""
    return x.reshape(*x.shape[:2], parts, -1, *x.shape[3:])


def _grows_with_new_tokens(updater: Updater) -> bool:
    """Whether the method needs more slots for more new tokens."""
    few, many = (updater.decode_bounds(1, 1, layers=1, vision=0, text=1, new_tokens=n) for n in (0, 2**16))
    return few is not None and many is not None and many > few
