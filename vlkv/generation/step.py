"""Runs new tokens through the layers of a model with a cache.

Axes: B batch · T new tokens · N query heads · K key heads · H head dim · D width · E entries · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache import new_tokens
from vlkv.cache.decode_state import DecodeState
from vlkv.cache.new_tokens import Fed, NewTokens, write_tails
from vlkv.cache.pool import PackedCache
from vlkv.compression.checking import require_32_bits
from vlkv.decoder import Decoder, Recurring
from vlkv.decoder.loop import can_loop, kind_of, loop

# Called with a layer's number, its decode state in this step, the attention [B,N,E] that each entry has received, and
# the output of the layer [B,1,D].
Watch = Callable[[int, DecodeState, Array, Array], Any]


class NewEntries(NamedTuple):
    """Queries, keys and values of new tokens in one layer with full attention, rotated."""

    q: Float[Array, "B T N H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]


class _Carry(NamedTuple):
    """What `_walk` passes from layer to layer."""

    fed: Fed
    entries: tuple[NewEntries, ...] = ()  # of each layer with full attention
    watched: tuple[Any, ...] = ()  # results of `watch`


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
        return _feed(decoder, cache, x, positions, valid, added, until)

    def step(cache: PackedCache, token: tuple[Any, ...]) -> tuple[PackedCache, Array]:
        x, positions, valid, added = jax.tree.map(lambda part: part[:, None], token)
        added = None if added is None else jnp.swapaxes(added, 1, 2)
        cache, x = _feed(decoder, cache, x, positions, valid, added)
        return cache, x[:, 0]

    # `scan` runs over the first axis, so T comes first.
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

    It also returns the results of `watch`, one for each layer with full attention.
    """
    cache, x, carry = _walk(decoder, cache, x, positions, _arriving(decoder, cache, x), added, watch)
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

    It also returns the queries, keys and values of the tokens in each layer with full attention.
    """
    cache, x, carry = _walk(decoder, cache, x, positions, _arriving(decoder, cache, x, valid), added)
    return cache, x, carry.entries


def append(cache: PackedCache, new: tuple[NewEntries, ...], valid: Bool[Array, "B T"]) -> PackedCache:
    """Writes the entries of new tokens to the tails of a cache, without running the model.

    `new` is from `feed_and_read` with another cache of the same prompts.
    """
    entry = jnp.where(valid, cache.used[:, None] + jnp.cumsum(valid, axis=1) - 1, cache.new_tokens)
    for i, layer in enumerate(new):
        cache = write_tails(cache, i, layer.k, layer.v, entry)
    return dataclasses.replace(cache, used=cache.used + jnp.sum(valid, axis=1))


def _feed(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"] | None,
    added: Float[Array, "B S T _D"] | None,
    until: Int[Array, "B T"] | None = None,
) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """`feed` for tokens that are processed together: by a loop over the layers if possible, else layer by layer."""
    new = _arriving(decoder, cache, x, valid, until)
    if can_loop(decoder):
        return _loop(decoder, cache, x, positions, new, added)
    return _walk(decoder, cache, x, positions, new, added)[:2]


def _arriving(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    valid: Bool[Array, "B T"] | None = None,
    until: Int[Array, "B T"] | None = None,
) -> NewTokens:
    causal = until is None or decoder.image_block_slides  # whether layers without a window ignore `until`
    return NewTokens.of(cache, x.shape[1], valid, until, causal=causal)


def _walk(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    new: NewTokens,
    added: Float[Array, "B S T _D"] | None,
    watch: Watch | None = None,
) -> tuple[PackedCache, Float[Array, "B T D"], _Carry]:
    """Runs all layers, one after the other, by `Decoder.walk`."""

    def attend(layer: int, carry: _Carry, q: Array, k: Array, v: Array) -> tuple[_Carry, Array]:
        kind = decoder.kinds[layer]
        if kind.is_counted:
            carry = carry._replace(entries=(*carry.entries, NewEntries(q, k, v)))
        fed, attended = new_tokens.attend(carry.fed, new, kind, q, k, v)
        return carry._replace(fed=fed), attended

    def recur(layer: int, carry: _Carry, run: Recurring) -> tuple[_Carry, Array]:
        kind = decoder.kinds[layer]
        output, state = run(carry.fed.cache.states[kind.number], new.present)
        return carry._replace(fed=new_tokens.put_state(carry.fed, kind, state)), output

    def after(layer: int, carry: _Carry, x: Array) -> tuple[_Carry, Array, None]:
        x, kind = decoder.add_features(added, layer, x), decoder.kinds[layer]
        if watch is not None and kind.is_counted:
            assert carry.fed.last_state is not None
            carry = carry._replace(watched=(*carry.watched, watch(kind.number, *carry.fed.last_state, x)))
        return carry, x, None

    start = _Carry(Fed.of(cache))
    carry, x = decoder.walk(start, x, positions, attend, after, cache.position_limit, recur=recur)
    return new_tokens.finished(carry.fed, cache, new), x, carry


def _loop(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    new: NewTokens,
    added: Float[Array, "B S T _D"] | None,
) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """Runs all layers of a decoder that `can_loop`."""

    def attend(i: Any, fed: Fed, q: Array, k: Array, v: Array) -> tuple[Fed, Array, None]:
        return *new_tokens.attend(fed, new, kind_of(decoder, i), q, k, v), None

    fed, x, _ = loop(decoder, Fed.of(cache), x, positions, attend, cache.position_limit, added=added)
    return new_tokens.finished(fed, cache, new), x
