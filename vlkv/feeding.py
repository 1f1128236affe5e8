"""New tokens through a cache: where their entries are written, and what they attend to.

Axes: B batch · T new tokens · N, K heads · H head dim · D width · E entries · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import QuantizedPool
from vlkv.cache import PackedCache, aged, write_pool, write_tail
from vlkv.decoder import Decoder
from vlkv.decoder.decoder import After
from vlkv.memory import Memory, arrive, attend_to
from vlkv.parallel import cached_attention
from vlkv.policies.selection import require_32_bits

Watch = Callable[[int, Memory, Array], None]


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
    """Embedded tokens through all layers: the cache with their entries, and the last layer's output.

    Methods that act while decoding act after every token, so their tokens go through the layers one after the other;
    with the others all T tokens go together.

    Args:
        decoder: of the model that made the cache.
        cache: with free slots for the tokens. `next_position` is left to the caller.
        x: embedded tokens.
        positions: what RoPE shall see.
        valid: which are no padding, which leaves no entry; None: all.
        watch: of a cache with memory and T = 1: called with each layer's number, its memory as this token attends to
            it, and the share of the attention [B, N, E] that every entry received.
        after: as in `Decoder.walk`.
    """
    require_32_bits()
    if cache.memory is not None and x.shape[1] > 1:
        return _one_by_one(decoder, cache, x, positions, valid)
    pool_k: Any = cache.k
    pool_v: Any = cache.v
    taken: list[Array] = []
    tail_k, tail_v, memory = list(cache.tail_k), list(cache.tail_v), list(cache.memory or ())
    count = jnp.arange(1, x.shape[1] + 1) if valid is None else jnp.cumsum(valid, axis=1)
    seen = cache.used[:, None] + count  # [B, T] entries of the tail that a token sees, its own too
    entry = seen - 1 if valid is None else jnp.where(valid, seen - 1, cache.new_tokens)  # past the end: not written
    # Many queries at once are matrix products, not the one row that the kernels of decoding are made for.
    kernel = cache.kernels.decode_attention if x.shape[1] == 1 else "xla"

    def attend(i: int, q: Array, k: Array, v: Array) -> Array:
        nonlocal pool_k, pool_v
        start = cache.start[i]
        tail: Any = None
        if cache.memory is not None:
            held, into = jax.vmap(arrive)(memory[i])
        if cache.reuses:
            taken.append(into)
            pool_k, pool_v = (
                write_pool(pool, new, into[:, None], start[:, None], valid, cache.parts)
                for pool, new in ((pool_k, k), (pool_v, v))
            )
        else:
            tail = tail_k[i], tail_v[i] = (
                write_tail(tail_k[i], k, entry, cache.parts), write_tail(tail_v[i], v, entry, cache.parts)
            )  # fmt: skip
            if cache.window is not None:
                assert isinstance(cache.k, QuantizedPool)
                tail = aged(tail, seen[:, 0], bits=cache.k.bits, group=cache.k.group, window=cache.window)
        segment = pool_k, pool_v, start, cache.length[i]
        if cache.memory is None:
            return cached_attention(
                q, segment, tail, seen, softmax_n=cache.softmax_n, parts=cache.parts, implementation=kernel
            )
        attended, mass = attend_to(
            q[:, 0], segment, tail, seen[:, 0], held, softmax_n=cache.softmax_n, kernels=cache.kernels,
            parts=cache.parts,
        )  # fmt: skip
        if watch is not None:
            watch(i, held, mass)
        memory[i] = held if cache.policy is None else jax.vmap(cache.policy.step)(held, mass)
        return attended[:, None]

    x = decoder.walk(x, positions, attend, after)
    used, memories, token = cache.used + count[..., -1], None if cache.memory is None else tuple(memory), cache.token
    if taken:
        where = jnp.stack(taken, axis=1), jnp.swapaxes(cache.start, 0, 1)  # [B, L, K]
        token = write_pool(token, jnp.full(where[0].shape, -1, jnp.int32), *where, valid, cache.parts)
    if valid is not None and memories is not None:  # padding is no step
        memories = jax.tree.map(
            lambda new, old: jnp.where(valid.reshape(-1, *(1,) * (new.ndim - 1)), new, old), memories, cache.memory
        )
    cache = dataclasses.replace(
        cache, k=pool_k, v=pool_v, token=token, tail_k=tuple(tail_k), tail_v=tuple(tail_v), used=used, memory=memories
    )
    return cache, x


def _one_by_one(decoder: Decoder, cache: PackedCache, *tokens: Any) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """One token after the other through all layers."""

    def step(cache: PackedCache, token: tuple[Any, ...]) -> tuple[PackedCache, Array]:
        cache, x = feed(decoder, cache, *(part[:, None] for part in token))
        return cache, x[:, 0]

    cache, x = jax.lax.scan(step, cache, jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), tokens))
    return cache, jnp.swapaxes(x, 0, 1)
