"""Runs new tokens through the layers with a cache: writes their entries and computes attention.

Axes: B batch · T new tokens · N query heads · K key heads · H head dim · D width · E entries · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Quantized, QuantizedPool
from pallas_kernels.core_attention import reads_tiles
from vlkv.cache import rings
from vlkv.cache.attention import attend_to
from vlkv.cache.decode_state import DecodeState, arrive, group_core
from vlkv.cache.pool import PackedCache, swap_pools
from vlkv.cache.writing import quantize_old, write_pool, write_tail
from vlkv.compression.checking import require_32_bits
from vlkv.decoder import Decoder, Recurring
from vlkv.sharding.ops import cached_attention

# layer, its decode state for this token, attention [B,N,E] that every entry received, output of the layer [B,1,D]
Watch = Callable[[int, DecodeState, Array, Array], Any]


class NewEntries(NamedTuple):
    """Queries, keys and values of new tokens in one layer with full attention, rotated."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


class _Carry(NamedTuple):
    """What `feed` carries from layer to layer."""

    cache: PackedCache  # with the new entries of the layers so far
    taken: tuple[Int[Array, "B K"], ...] = ()  # the entry of the new token in each layer, if slots are reused
    # The state of the last layer that has one, as it was read, and the attention that its entries received.
    last_state: tuple[DecodeState, Float[Array, "B N E"]] | None = None
    views: tuple[rings.View, ...] = ()  # what the new tokens attend to in each ring
    watched: tuple[Any, ...] = ()  # results of `watch`
    read: tuple[NewEntries, ...] = ()  # of each layer with entries of its own


def feed(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"] | None = None,
    added: Float[Array, "B S T _D"] | None = None,
    until: Int[Array, "B T"] | None = None,
) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """Runs embedded tokens through all layers; returns the cache with their entries, and the last layer's output.

    If the cache has a decode state or KIVI's window, tokens are processed one after the other, because what attention
    reads changes with each. Otherwise all T tokens are processed together.

    Args:
        decoder: of the model that made the cache.
        cache: with capacity for the tokens. The caller updates `next_position`.
        x: embedded tokens.
        positions: of the tokens, for RoPE.
        valid: False for padding, which has no entry; None: there is no padding.
        added: as in `Decoder.add_features`.
        until: index of the last of these tokens that each one attends to; None: itself. Tokens that are processed one
            by one attend only to earlier ones.
    """
    require_32_bits()
    if not cache.one_by_one or x.shape[1] == 1:
        return _feed(decoder, cache, x, positions, valid, added, until)[:2]

    def step(cache: PackedCache, token: tuple[Any, ...]) -> tuple[PackedCache, Array]:
        x, positions, valid, added = jax.tree.map(lambda part: part[:, None], token)
        added = None if added is None else jnp.swapaxes(added, 1, 2)
        cache, x, _ = _feed(decoder, cache, x, positions, valid, added)
        return cache, x[:, 0]

    by_token = None if added is None else jnp.swapaxes(added, 1, 2)
    tokens = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), (x, positions, valid, by_token))
    cache, x = jax.lax.scan(step, cache, tokens)
    return cache, jnp.swapaxes(x, 0, 1)


def feed_and_watch(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B 1 D"],
    positions: Int[Array, "B 1 A"],
    watch: Watch,
    added: Float[Array, "B S 1 _D"] | None = None,
) -> tuple[PackedCache, Float[Array, "B 1 D"], tuple[Any, ...]]:
    """`feed` for one token and a cache with a decode state.

    It also returns the results of `watch`, one per layer that policies count.
    """
    cache, x, carry = _feed(decoder, cache, x, positions, None, added, watch=watch)
    return cache, x, carry.watched


def feed_and_read(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"],
    added: Float[Array, "B S T _D"] | None = None,
) -> tuple[PackedCache, Float[Array, "B T D"], tuple[NewEntries, ...]]:
    """`feed` for a cache that processes all tokens together.

    It also returns what the tokens have added to each layer that policies count.
    """
    cache, x, carry = _feed(decoder, cache, x, positions, valid, added)
    return cache, x, carry.read


def append(cache: PackedCache, new: tuple[NewEntries, ...], valid: Bool[Array, "B T"]) -> PackedCache:
    """The cache with entries of new tokens, which another cache of the same prompts has processed, in its tails."""
    entry = jnp.where(valid, cache.used[:, None] + jnp.cumsum(valid, axis=1) - 1, cache.new_tokens)
    for i, layer in enumerate(new):
        cache, _ = _write_tails(cache, i, layer.k, layer.v, entry)
    return dataclasses.replace(cache, used=cache.used + jnp.sum(valid, axis=1))


def _feed(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"] | None,
    added: Float[Array, "B S T _D"] | None,
    until: Int[Array, "B T"] | None = None,
    watch: Watch | None = None,
) -> tuple[PackedCache, Float[Array, "B T D"], _Carry]:
    """All layers, for tokens that can be processed together.

    In a layer with a decode state: `arrive` reserves an entry, keys and values are written, attention reads what the
    state attends to, and `step` of the policy updates the state, which may evict entries. A layer that uses the entries
    of an earlier one attends to what that layer has attended to, and changes nothing.
    """
    count = jnp.arange(1, x.shape[1] + 1) if valid is None else jnp.cumsum(valid, axis=1)
    stored = cache.used[:, None] + count  # [B, T] entries of the tail up to each token
    # Padding gets an entry number past the end, which is not written.
    tail_entry = stored - 1 if valid is None else jnp.where(valid, stored - 1, cache.new_tokens)
    # [B, T] entries of the tail that a token attends to; not used if there is no tail
    in_tail = stored if until is None or decoder.image_block_slides else jnp.take_along_axis(stored, until, axis=1)
    # Kernels for decoding are made for one query; several queries are matrix products, which XLA computes well.
    kernel = cache.kernels.decode_attention if x.shape[1] == 1 else "xla"
    updater = cache.policy
    present = jnp.ones(x.shape[:2], bool) if valid is None else valid
    places = None if cache.rings is None else cache.rings.places(cache.used, present)

    def attend(layer: int, carry: _Carry, q: Array, k: Array, v: Array) -> tuple[_Carry, Array]:
        now, taken = carry.cache, carry.taken
        window, i, shared, _ = decoder.kinds[layer]  # i: its number among the layers of its kind
        if window is not None:
            assert places is not None
            carry = carry if shared else _write_ring(carry, i, k, v, places)
            return carry, rings.attend(carry.views[i], q, places, now.kernels, until, window=window)
        carry = carry if shared else carry._replace(read=(*carry.read, NewEntries(q, k, v)))
        tail: tuple[Any, Any] | None = None if now.reuses else (now.tail_k[i], now.tail_v[i])
        if now.decode_states is None:
            now, tail = (now, tail) if shared else _write_tails(now, i, k, v, tail_entry)
            return carry._replace(cache=now), cached_attention(
                q, now.segment(i), _as_seen(now, tail, in_tail), in_tail, softmax_n=now.softmax_n, parts=now.parts,
                longest=now.longest, implementation=kernel,
            )  # fmt: skip
        if shared:
            assert carry.last_state is not None
            return carry, _attend_with(now, i, q, tail, in_tail, carry.last_state[0])[0]
        state, entry = jax.vmap(arrive)(now.decode_states[i])
        if now.reuses:
            now, taken = _write_pools(now, i, k, v, entry, valid), (*taken, entry)
        else:
            now, tail = _write_tails(now, i, k, v, tail_entry)
        if state.core is not None:  # A-VL only
            now, state = _group_core(now, i, state, valid)
        attended, mass = _attend_with(now, i, q, tail, in_tail, state)
        new = state if updater is None else jax.vmap(updater.step)(state, mass)
        assert now.decode_states is not None
        now = dataclasses.replace(now, decode_states=_put(now.decode_states, i, new))
        return carry._replace(cache=now, taken=taken, last_state=(state, mass)), attended

    def after(layer: int, carry: _Carry, x: Array) -> tuple[_Carry, Array, None]:
        x, kind = decoder.add_features(added, layer, x), decoder.kinds[layer]
        if watch is not None and kind.is_counted:
            assert carry.last_state is not None
            carry = carry._replace(watched=(*carry.watched, watch(kind.number, *carry.last_state, x)))
        return carry, x, None

    carry, x = decoder.walk(
        _Carry(cache),
        x,
        positions,
        attend,
        after,
        cache.position_limit,
        recur=partial(_recur, decoder, x.shape[:2], valid),
    )
    fed = dataclasses.replace(carry.cache, used=cache.used + count[..., -1])
    if carry.taken:  # all layers in one write, where L takes the place of T; -1: new tokens have no index in the prompt
        where = jnp.stack(carry.taken, axis=1), jnp.swapaxes(cache.start, 0, 1)  # [B, L, K]
        token = write_pool(fed.token, jnp.full(where[0].shape, -1, jnp.int32), *where, valid, cache.parts)
        fed = dataclasses.replace(fed, token=token)
    if valid is not None and cache.decode_states is not None:  # padding does not change the decode state
        rows = valid[:, 0]
        states = jax.tree.map(
            lambda new, old: jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
            fed.decode_states, cache.decode_states,
        )  # fmt: skip
        fed = dataclasses.replace(fed, decode_states=states)
    return fed, x, carry


def _write_ring(
    carry: _Carry, i: int, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], places: Int[Array, "B T"]
) -> _Carry:
    """The carry with new entries in ring i."""
    now = carry.cache
    assert now.rings is not None
    ring, view = rings.write(now.rings.layers[i], k, v, places, now.kernels)
    changed = dataclasses.replace(now.rings, layers=_put(now.rings.layers, i, ring))
    return carry._replace(cache=dataclasses.replace(now, rings=changed), views=(*carry.views, view))


def _attend_with(
    cache: PackedCache,
    i: int,
    q: Float[Array, "B 1 N H"],
    tail: tuple[Array, Array] | None,
    in_tail: Int[Array, "B 1"],
    state: DecodeState,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B N E"]]:
    """Attention of one query to the entries of layer i that its decode state attends to, and what each received."""
    attended, mass = attend_to(
        q[:, 0], cache.segment(i), _as_seen(cache, tail, in_tail), in_tail[:, 0], state, softmax_n=cache.softmax_n,
        kernels=cache.kernels, parts=cache.parts,
    )  # fmt: skip
    return attended[:, None], mass


def _as_seen(cache: PackedCache, tail: tuple[Any, Any] | None, in_tail: Int[Array, "B T"]) -> tuple[Any, Any] | None:
    """Keys and values of a tail as attention sees them: in some caches, older entries are quantised."""
    if cache.full_precision is None:
        return tail
    assert isinstance(cache.k, QuantizedPool) and tail is not None
    return quantize_old(tail, in_tail[:, 0], bits=cache.k.bits, group=cache.k.group, window=cache.full_precision)


def _recur(
    decoder: Decoder, shape: tuple[int, ...], valid: Bool[Array, "B T"] | None, i: int, carry: _Carry, run: Recurring
) -> tuple[_Carry, Array]:
    """A layer with a recurrence, for `Decoder.walk`, which goes on from the state in the cache."""
    now, i = carry.cache, decoder.kinds[i].number
    read, state = run(now.states[i], jnp.ones(shape, bool) if valid is None else valid)
    return carry._replace(cache=dataclasses.replace(now, states=_put(now.states, i, state))), read


def _put(layers: tuple[Any, ...], i: int, new: Any) -> tuple[Any, ...]:
    return (*layers[:i], new, *layers[i + 1 :])


def _write_tails(
    cache: PackedCache, i: int, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], entry: Int[Array, "B T"]
) -> tuple[PackedCache, tuple[Any, Any]]:
    """The cache with new entries in the tail of layer i, and this tail."""
    tail_k = write_tail(cache.tail_k[i], k, entry, cache.parts, cache.kernels)
    tail_v = write_tail(cache.tail_v[i], v, entry, cache.parts, cache.kernels)
    every_k, every_v = _put(cache.tail_k, i, tail_k), _put(cache.tail_v, i, tail_v)
    return dataclasses.replace(cache, tail_k=every_k, tail_v=every_v), (tail_k, tail_v)


def _write_pools(
    cache: PackedCache,
    i: int,
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    entry: Int[Array, "B K"],
    valid: Bool[Array, "B 1"] | None,
) -> PackedCache:
    """The cache with one new entry per row in the segment of layer i."""
    where = entry[:, None], cache.start[i][:, None], valid, cache.parts, cache.kernels
    pool_k: Any = cache.k  # methods that reuse slots have no quantised pool
    pool_v: Any = cache.v
    return dataclasses.replace(cache, k=write_pool(pool_k, k, *where), v=write_pool(pool_v, v, *where))


def _group_core(
    cache: PackedCache, i: int, state: DecodeState, valid: Bool[Array, "B 1"] | None
) -> tuple[PackedCache, DecodeState]:
    """Moves the core entries of layer i into as few tiles as possible, on hardware that reads whole tiles (a TPU).

    Not in a pool with one column or with its slots split, where heads or devices would need different exchanges.
    """
    columns = cache.k.shape[1]
    if cache.parts > 1 or columns < cache.start.shape[2] or not reads_tiles(cache.k, cache.kernels.core_attention):
        return cache, state
    start = cache.start[i]
    may = jnp.all(start == start[:, :1], axis=1) & (True if valid is None else valid[:, 0])
    state, pairs = group_core(state, may)
    assert not isinstance(cache.k, Quantized) and not isinstance(cache.v, Quantized)  # `reads_tiles` says so
    k, v, token = swap_pools(cache.k, cache.v, cache.token, pairs, start, cache.kernels)
    return dataclasses.replace(cache, k=k, v=v, token=token), state
