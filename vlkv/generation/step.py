"""Runs new tokens through the layers with a cache: writes their entries and computes attention.

Axes: B batch · T new tokens · N query heads · K key heads · H head dim · D width · E entries · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import QuantizedPool
from vlkv.cache.attention import attend_to
from vlkv.cache.decode_state import DecodeState, arrive
from vlkv.cache.pool import PackedCache
from vlkv.cache.writing import quantize_old, write_pool, write_tail
from vlkv.compression.selection import require_32_bits
from vlkv.decoder import Decoder
from vlkv.decoder.decoder import After
from vlkv.sharding.ops import cached_attention

Watch = Callable[[int, DecodeState, Array], None]


def feed(
    decoder: Decoder,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"] | None = None,
    *,
    watch: Watch | None = None,
    after: After | None = None,
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
        watch: for a cache with a decode state and T = 1: called for each layer with its number, its decode state
            for this token, and the share of attention [B, N, E] that every entry received.
        after: as in `Decoder.walk`. It is ignored, like `watch`, if several tokens are processed one after the other.
    """
    require_32_bits()
    if (cache.decode_states is not None or cache.window is not None) and x.shape[1] > 1:
        return _one_by_one(decoder, cache, x, positions, valid)
    pool_k: Any = cache.k
    pool_v: Any = cache.v
    entries_taken: list[Array] = []
    updater = None if cache.policy is None else cache.policy.updater
    tail_k, tail_v, states = list(cache.tail_k), list(cache.tail_v), list(cache.decode_states or ())
    count = jnp.arange(1, x.shape[1] + 1) if valid is None else jnp.cumsum(valid, axis=1)
    in_tail = cache.used[:, None] + count  # [B, T] entries of the tail that a token attends to, including its own
    # Padding gets an entry number past the end, which is not written.
    tail_entry = in_tail - 1 if valid is None else jnp.where(valid, in_tail - 1, cache.new_tokens)
    # Kernels for decoding are made for one query; several queries are matrix products, which XLA computes well.
    kernel = cache.kernels.decode_attention if x.shape[1] == 1 else "xla"

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal pool_k, pool_v
        start = cache.start[i]
        tail: Any = None
        if cache.decode_states is not None:
            state, entry = jax.vmap(arrive)(states[i])
        if cache.reuses:
            entries_taken.append(entry)
            pool_k, pool_v = (
                write_pool(pool, new, entry[:, None], start[:, None], valid, cache.parts, cache.kernels)
                for pool, new in ((pool_k, k), (pool_v, v))
            )
        else:
            tail = tail_k[i], tail_v[i] = (
                write_tail(tail_k[i], k, tail_entry, cache.parts, cache.kernels),
                write_tail(tail_v[i], v, tail_entry, cache.parts, cache.kernels),
            )
            if cache.window is not None:
                assert isinstance(cache.k, QuantizedPool)
                tail = quantize_old(tail, in_tail[:, 0], bits=cache.k.bits, group=cache.k.group, window=cache.window)
        segment = pool_k, pool_v, start, cache.length[i]
        if cache.decode_states is None:
            return cached_attention(
                q, segment, tail, in_tail, softmax_n=cache.softmax_n, parts=cache.parts, implementation=kernel
            )
        attended, mass = attend_to(
            q[:, 0], segment, tail, in_tail[:, 0], state, softmax_n=cache.softmax_n, kernels=cache.kernels,
            parts=cache.parts,
        )  # fmt: skip
        if watch is not None:
            watch(i, state, mass)
        states[i] = state if updater is None else jax.vmap(updater.step)(state, mass)
        return attended[:, None]

    x = decoder.walk(x, positions, attend, after, cache.position_limit)
    used, token = cache.used + count[..., -1], cache.token
    updated = None if cache.decode_states is None else tuple(states)
    if entries_taken:  # all layers in one write; -1, because new tokens have no index in the prompt
        where = jnp.stack(entries_taken, axis=1), jnp.swapaxes(cache.start, 0, 1)  # [B, L, K]
        token = write_pool(token, jnp.full(where[0].shape, -1, jnp.int32), *where, valid, cache.parts)
    if valid is not None and updated is not None:  # padding does not change the decode state
        rows = valid[:, 0]
        updated = jax.tree.map(
            lambda new, old: jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old), updated, cache.decode_states
        )
    cache = dataclasses.replace(
        cache, k=pool_k, v=pool_v, token=token, tail_k=tuple(tail_k), tail_v=tuple(tail_v), used=used,
        decode_states=updated,
    )  # fmt: skip
    return cache, x


def _one_by_one(decoder: Decoder, cache: PackedCache, *tokens: Any) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """`feed` for one token after the other."""

    def step(cache: PackedCache, token: tuple[Any, ...]) -> tuple[PackedCache, Array]:
        cache, x = feed(decoder, cache, *jax.tree.map(lambda part: part[:, None], token))
        return cache, x[:, 0]

    cache, x = jax.lax.scan(step, cache, jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tokens))
    return cache, jnp.swapaxes(x, 0, 1)
