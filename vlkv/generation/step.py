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
    """What `_run` passes from layer to layer."""

    fed: Fed
    entries: NewEntries | None = None  # of the last layer, for `watch`
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
        return _run(decoder, cache, x, positions, valid, added, until)[:2]

    def step(cache: PackedCache, token: tuple[Any, ...]) -> tuple[PackedCache, Array]:
        x, positions, valid, added = jax.tree.map(lambda part: part[:, None], token)
        added = None if added is None else jnp.swapaxes(added, 1, 2)
        cache, x, _ = _run(decoder, cache, x, positions, valid, added)
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

    def watch_state(number: int, fed: Fed, entries: NewEntries, x: Array) -> Any:
        assert fed.last_state is not None
        return watch(number, *fed.last_state, x)

    return _run(decoder, cache, x, positions, None, added, watch=watch_state)


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
    return _run(decoder, cache, x, positions, valid, added, watch=lambda number, fed, entries, x: entries)


def append(cache: PackedCache, new: tuple[NewEntries, ...], valid: Bool[Array, "B T"]) -> PackedCache:
    """Writes the entries of new tokens to the tails of a cache, without running the model.

    `new` is from `feed_and_read` with another cache of the same prompts.
    """
    entry = jnp.where(valid, cache.used[:, None] + jnp.cumsum(valid, axis=1) - 1, cache.new_tokens)
    for i, layer in enumerate(new):
        cache = write_tails(cache, i, layer.k, layer.v, entry)
    return dataclasses.replace(cache, used=cache.used + jnp.sum(valid, axis=1))


def _run(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"] | None,
    added: Float[Array, "B S T _D"] | None,
    until: Int[Array, "B T"] | None = None,
    watch: Callable[[int, Fed, NewEntries, Array], Any] | None = None,
) -> tuple[PackedCache, Float[Array, "B T D"], tuple[Any, ...]]:
    """`feed` for tokens that are processed together: by a loop over the layers if possible, else layer by layer.

    It also returns the results of `watch`, one for each layer with full attention, which prevents the loop.
    """
    causal = until is None or decoder.image_block_slides  # whether layers without a window ignore `until`
    new = NewTokens.of(cache, x.shape[1], valid, until, causal=causal)
    in_loop = watch is None and can_loop(decoder)

    def attend(layer: Any, carry: _Carry, q: Array, k: Array, v: Array) -> tuple[_Carry, Array]:
        fed, attended = new_tokens.attend(carry.fed, new, kind_of(decoder, layer), q, k, v)
        return carry._replace(fed=fed, entries=None if watch is None else NewEntries(q, k, v)), attended

    def recur(layer: int, carry: _Carry, run: Recurring) -> tuple[_Carry, Array]:
        kind = decoder.kinds[layer]
        output, state = run(carry.fed.cache.states[kind.number], new.present)
        return carry._replace(fed=new_tokens.put_state(carry.fed, kind, state)), output

    def after(layer: int, carry: _Carry, x: Array) -> tuple[_Carry, Array, None]:
        x, kind = decoder.add_features(added, layer, x), decoder.kinds[layer]
        if watch is not None and kind.is_counted:
            assert carry.entries is not None
            carry = carry._replace(watched=(*carry.watched, watch(kind.number, carry.fed, carry.entries, x)))
        return carry, x, None

    carry, limit = _Carry(Fed.of(cache)), cache.position_limit
    if in_loop:
        carry, x, _ = loop(decoder, carry, x, positions, lambda *args: (*attend(*args), None), limit, added=added)
    else:
        carry, x = decoder.walk(carry, x, positions, attend, after, limit, recur=recur)
    return new_tokens.finished(carry.fed, cache, new), x, carry.watched
