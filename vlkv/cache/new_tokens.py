"""New tokens in each kind of layer: their entries are written to the cache, and their queries attend to it.

A layer that uses the entries of an earlier one (`LayerKind.shared`) attends to what that layer has attended to in this
step, before an eviction, and writes nothing.

Axes: B batch · T new tokens · L layers · N query heads · K key heads · H head dim · E entries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import Quantized, QuantizedPool
from pallas_kernels.decode_attention import reads_tiles
from vlkv.cache import rings
from vlkv.cache.attention import Tail, attend_to, cached_attention
from vlkv.cache.decode_state import DecodeState, arrive, group_core
from vlkv.cache.pool import PackedCache, swap_pools
from vlkv.cache.reselection import keep_queries
from vlkv.cache.states import State
from vlkv.cache.writing import of_layer, quantize_old, write_pool, write_tail
from vlkv.config import LayerKind

LayerNumber = int | Int[Array, ""]  # the number of a layer; an array in a loop over the layers


class NewTokens(NamedTuple):
    """Where the entries of new tokens are written, and what the tokens attend to."""

    valid: Bool[Array, "B T"] | None  # False: padding, which has no entry; None: there is no padding
    present: Bool[Array, "B T"]  # the same, also without padding
    used: Int[Array, " B"]  # number of new tokens in the cache after these
    tail_entry: Int[Array, "B T"]  # index of each entry in the tail; of padding, an index past its end
    in_tail: Int[Array, "B T"]  # number of tail entries that each token attends to
    until: Int[Array, "B T"] | None  # index of the last of these tokens that each one attends to; None: itself
    places: Int[Array, "B T"] | None  # number of each token in its row, for rings; None: the model has no rings

    @classmethod
    def of(
        cls,
        cache: PackedCache,
        length: int,
        valid: Bool[Array, "B T"] | None,
        until: Int[Array, "B T"] | None,
        *,
        causal: bool,
    ) -> NewTokens:
        """Counts `length` new tokens per row. With `causal`, layers without a window ignore `until`."""
        present = jnp.ones((len(cache.used), length), bool) if valid is None else valid
        count = jnp.arange(1, length + 1) if valid is None else jnp.cumsum(valid, axis=1)
        stored = cache.used[:, None] + count  # entries of the tail up to each token
        return cls(
            valid=valid,
            present=present,
            used=cache.used + count[..., -1],
            tail_entry=stored - 1 if valid is None else jnp.where(valid, stored - 1, cache.new_tokens),
            in_tail=stored if until is None or causal else jnp.take_along_axis(stored, until, axis=1),
            until=until,
            places=None if cache.rings is None else cache.rings.places(cache.used, present),
        )


class Fed(NamedTuple):
    """A cache while new tokens pass from layer to layer."""

    cache: PackedCache  # with the new entries of the layers so far
    taken: Int[Array, "L B K"] | None  # the entry of the new token in each layer, if slots are reused
    # The state of the last layer that has one, as it was read, and the attention that its entries received.
    last_state: tuple[DecodeState, Float[Array, "B N E"]] | None = None
    views: tuple[rings.View, ...] = ()  # what the new tokens attend to in each ring

    @classmethod
    def of(cls, cache: PackedCache) -> Fed:
        """Before the first layer."""
        return cls(cache, jnp.zeros(cache.start.shape, jnp.int32) if cache.reuses else None)


def attend(fed: Fed, new: NewTokens, kind: LayerKind, q: Array, k: Array, v: Array) -> tuple[Fed, Array]:
    """Writes the keys and values of one layer; returns the attention of the queries [B, T, N, H].

    Args:
        fed: the cache after the layers before this one.
        new: the tokens.
        kind: of the layer.
        q: rotated queries [B, T, N, H].
        k: rotated keys [B, T, K, H].
        v: values [B, T, K, H].
    """
    if kind.window is not None:
        return _attend_in_window(fed, new, kind, q, k, v)
    if fed.cache.decode_states is None:
        return _attend_to_all(fed, new, kind, q, k, v)
    return _attend_to_state(fed, new, kind, q, k, v)


def _attend_in_window(fed: Fed, new: NewTokens, kind: LayerKind, q: Array, k: Array, v: Array) -> tuple[Fed, Array]:
    """A layer with a sliding window: its entries are in a ring."""
    cache, i = fed.cache, kind.number
    assert cache.rings is not None and new.places is not None and kind.window is not None
    if not kind.shared:
        ring, view = rings.write(cache.rings.layers[i], k, v, new.places, cache.kernels)
        changed = dataclasses.replace(cache.rings, layers=_put(cache.rings.layers, i, ring))
        fed = fed._replace(cache=dataclasses.replace(cache, rings=changed), views=(*fed.views, view))
    return fed, rings.attend(fed.views[i], q, new.places, cache.kernels, new.until, window=kind.window)


def _attend_to_all(fed: Fed, new: NewTokens, kind: LayerKind, q: Array, k: Array, v: Array) -> tuple[Fed, Array]:
    """A layer without a decode state: the tokens attend to its segment and to its tail."""
    i, cache = kind.number, fed.cache
    if not kind.shared:
        cache = write_tails(cache, i, k, v, new.tail_entry)
        cache = keep_queries(cache, i, q, new.tail_entry)
    # Kernels for decoding are made for one query; several queries are matrix products, which XLA computes well.
    kernel = cache.kernels.decode_attention if q.shape[1] == 1 else "xla"
    segment, tail = cache.segment(i), _visible_tail(cache, i, new.in_tail)
    options: Any = {"softmax_n": cache.softmax_n, "parts": cache.parts, "longest": cache.longest}
    attended = cached_attention(q, segment, tail, new.in_tail, implementation=kernel, **options)
    return fed._replace(cache=cache), attended


def _attend_to_state(fed: Fed, new: NewTokens, kind: LayerKind, q: Array, k: Array, v: Array) -> tuple[Fed, Array]:
    """A layer with a decode state, for one token of each row.

    `arrive` reserves an entry, keys and values are written, attention reads what the state attends to, and `step` of
    the policy updates the state, which may evict entries.
    """
    cache, i = fed.cache, kind.number
    if kind.shared:
        assert fed.last_state is not None
        return fed, _attend_to_entries(cache, i, q, new.in_tail, fed.last_state[0])[0]
    assert cache.decode_states is not None
    state, entry = jax.vmap(arrive)(_get(cache.decode_states, i))
    if cache.reuses:
        cache, fed = _write_pools(cache, i, k, v, entry, new.valid), fed._replace(taken=_put(fed.taken, i, entry))
    else:
        cache = write_tails(cache, i, k, v, new.tail_entry)
    if state.core is not None:
        cache, state = _group_core(cache, i, state, new.valid)
    attended, mass = _attend_to_entries(cache, i, q, new.in_tail, state)
    stepped = state if cache.policy is None else jax.vmap(cache.policy.step)(state, mass)
    cache = dataclasses.replace(cache, decode_states=_put(cache.decode_states, i, stepped))
    last = (state, mass) if isinstance(i, int) else None  # a loop has no shared layers, which need it
    return fed._replace(cache=cache, last_state=last), attended


def _attend_to_entries(
    cache: PackedCache, i: LayerNumber, q: Float[Array, "B 1 N H"], in_tail: Int[Array, "B 1"], state: DecodeState
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B N E"]]:
    """Attention of one query to the entries of layer i that its decode state attends to, and what each received."""
    tail = None if cache.reuses else _visible_tail(cache, i, in_tail)
    options: Any = {"softmax_n": cache.softmax_n, "kernels": cache.kernels, "parts": cache.parts}
    attended, mass = attend_to(q[:, 0], cache.segment(i), tail, in_tail[:, 0], state, **options)
    return attended[:, None], mass


def put_state(fed: Fed, kind: LayerKind, state: State) -> Fed:
    """The cache with the new state of a layer with a recurrence."""
    states = _put(fed.cache.states, kind.number, state)
    return fed._replace(cache=dataclasses.replace(fed.cache, states=states))


def finished(fed: Fed, before: PackedCache, new: NewTokens) -> PackedCache:
    """The cache after all layers: counts the tokens, and leaves the decode states of padding as they were.

    Args:
        fed: after the last layer.
        before: the cache before the first layer.
        new: the tokens.
    """
    cache = dataclasses.replace(fed.cache, used=new.used)
    if fed.taken is not None:
        # One write for all layers, with L in place of the axis T. A new token has no index in the prompt: -1.
        entry, start = (jnp.swapaxes(x, 0, 1) for x in (fed.taken, before.start))  # [B, L, K]
        none = jnp.full(entry.shape, -1, jnp.int32)
        token = write_pool(cache.token, none, entry, start, new.valid, before.parts)
        cache = dataclasses.replace(cache, token=token)
    if new.valid is None or before.decode_states is None:
        return cache
    rows = new.valid[:, 0]

    def only_valid_rows(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 2)), new, old)

    states = jax.tree.map(only_valid_rows, cache.decode_states, before.decode_states)
    return dataclasses.replace(cache, decode_states=states)


def write_tails(
    cache: PackedCache, i: LayerNumber, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], entry: Int[Array, "B T"]
) -> PackedCache:
    """The cache with new entries in the tail of layer i, at the indices `entry`; those past its end are not written."""
    assert cache.tail_k is not None and cache.tail_v is not None
    tail_k, tail_v = (
        write_tail(tail, i, x, entry, cache.parts, cache.kernels) for tail, x in ((cache.tail_k, k), (cache.tail_v, v))
    )
    return dataclasses.replace(cache, tail_k=tail_k, tail_v=tail_v)


def _visible_tail(cache: PackedCache, i: LayerNumber, in_tail: Int[Array, "B T"]) -> Tail:
    """The tail of layer i as attention reads it: with KIVI, older entries are quantised."""
    k, v = cache.tail_k, cache.tail_v
    if cache.full_precision is None:
        return Tail(k, v, i)
    assert isinstance(cache.k, QuantizedPool)
    options = {"bits": cache.k.bits, "group": cache.k.group, "window": cache.full_precision}
    k, v = quantize_old((of_layer(k, i), of_layer(v, i)), in_tail[:, 0], **options)
    return Tail(k[:, :, None], v[:, :, None], 0)


def _get(layers: Any, i: LayerNumber) -> Any:
    """Entry i of a tuple, or of a tree of arrays with a leading axis L."""
    if isinstance(layers, tuple):
        return layers[i]
    return jax.tree.map(lambda x: x[i], layers)


def _put(layers: Any, i: LayerNumber, new: Any) -> Any:
    """`layers` with `new` as entry i."""
    if isinstance(layers, tuple):
        return (*layers[:i], new, *layers[i + 1 :])
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, i, 0), layers, new)


def _write_pools(
    cache: PackedCache,
    i: LayerNumber,
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
    cache: PackedCache, i: LayerNumber, state: DecodeState, valid: Bool[Array, "B 1"] | None
) -> tuple[PackedCache, DecodeState]:
    """Moves the core entries of layer i into as few tiles as possible, on hardware that reads whole tiles (a TPU).

    A pool with one column, or whose slots are split, is left alone: heads or devices would need different exchanges.
    """
    columns = cache.k.shape[1]
    if cache.parts > 1 or columns < cache.start.shape[2] or not reads_tiles(cache.k, cache.kernels.core_attention):
        return cache, state
    start = cache.start[i]
    may_change = jnp.all(start == start[:, :1], axis=1) & (True if valid is None else valid[:, 0])
    state, pairs = group_core(state, may_change)
    assert not isinstance(cache.k, Quantized) and not isinstance(cache.v, Quantized)  # `reads_tiles` is False for them
    k, v, token = swap_pools(cache.k, cache.v, cache.token, pairs, start, cache.kernels)
    return dataclasses.replace(cache, k=k, v=v, token=token), state
