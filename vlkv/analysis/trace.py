"""Decoding of given tokens that records every layer: hidden states, attention, and stored entries.

Axes: B batch · S tokens fed · L layers · D width · N, K heads · T prompt · M bound on a segment · E = T + room for new
tokens. Attention is by token here, not by slot, so that traces of different caches can be compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache import PackedCache
from vlkv.families import Model
from vlkv.feeding import feed
from vlkv.memory import Memory, begin, packed
from vlkv.reading import Prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The record of every step."""

    logits: Float[Array, "*S B vocab"]  # after each fed token
    hidden: Float[Array, "*S L B D"]  # after each layer
    mass: Float[Array, "*S L B E"]  # share of the attention that each token received, mean over heads (A-VL, Eq. 1)
    stored: Float[Array, "*S L B"]  # entries in memory, mean over key heads
    used: Float[Array, "*S L B"]  # entries attended to, likewise


def follow(
    params: Model,
    prompt: Prompt,
    cache: PackedCache,
    tokens: Int[Array | np.ndarray, "B S"],
    *,
    only: Bool[Array, "L B K T"] | None = None,
) -> Trace:
    """Feeds the tokens one by one, as `decode_step` does, and records what happens.

    Args:
        params: the model.
        prompt: that the cache was made from.
        cache: of any policy; its tail must have capacity for the tokens.
        tokens: to be fed; -1, padding, is fed as 0.
        only: prompt tokens that may be attended to, of those in the cache; None: all.
    """
    memory = _memory(prompt, cache)
    if only is not None:
        memory = tuple(_restrict(m, _tokens(m, prompt.valid), only[i]) for i, m in enumerate(memory))

    def step(cache: PackedCache, token: Int[Array, " B"]) -> tuple[PackedCache, Trace]:
        hidden, masses, counts = [], [], []

        def watch(i: int, memory: Memory, mass: Array) -> None:
            masses.append(_by_token(mass, _tokens(memory, prompt.valid), prompt.valid.shape[1] + cache.new_tokens))
            counts.append([jnp.mean(jnp.sum(x, axis=-1), axis=-1) for x in (memory.stored, memory.attended)])

        def after(i: int, x: Array) -> tuple[Array, None]:
            hidden.append(x[:, 0])
            return x, None

        x, positions = params.decoder.embedding(token)[:, None], cache.next_position[:, None]
        cache, x = feed(params.decoder, cache, x, positions, watch=watch, after=after)
        stored, used = (jnp.stack(column) for column in zip(*counts, strict=True))
        return dataclasses.replace(cache, next_position=cache.next_position + 1), Trace(
            logits=params.decoder.logits(x[:, 0]), hidden=jnp.stack(hidden), mass=jnp.stack(masses), stored=stored,
            used=used,
        )  # fmt: skip

    assert tokens.shape[0] == prompt.valid.shape[0]
    fed = jnp.maximum(jnp.asarray(tokens), 0).T
    return jax.lax.scan(step, dataclasses.replace(cache, memory=memory), fed)[1]


def _memory(prompt: Prompt, cache: PackedCache) -> tuple[Memory, ...]:
    """The cache's own, or for a method that does not act one that remembers what is there."""
    if cache.memory is not None:
        return cache.memory

    most = prompt.valid.shape[1]

    def made(token: Any, slots: Any, is_vision: Any, valid: Any) -> Memory:
        kept = jnp.zeros((len(token), most), bool).at[jnp.arange(len(token))[:, None], token].max(token >= 0)
        memory = begin(kept, {}, is_vision, valid, new_tokens=0)
        return packed(memory, token, slots, new_tokens=cache.new_tokens, reuses=False)

    return tuple(
        jax.vmap(made)(cache.entries(i, most), cache.length[i], prompt.is_vision, prompt.valid)
        for i in range(cache.start.shape[0])
    )


def _tokens(memory: Memory, valid: Bool[Array, "B T"]) -> Int[Array, "B K E"]:
    """Which token each entry is: of the prompt, or T + n for the n-th new one."""
    length, count = valid.shape[1], jnp.sum(valid, axis=1)[:, None, None]
    order = jnp.argsort(~valid, axis=1, stable=True)[:, None]
    of_prompt = jnp.take_along_axis(order, jnp.minimum(memory.place, length - 1), axis=2)
    return jnp.where(memory.place < count, of_prompt, length + memory.place - count)


def _restrict(memory: Memory, tokens: Int[Array, "B K E"], only: Bool[Array, "B K T"]) -> Memory:
    """Masks prompt entries that are not wanted."""
    wanted = jnp.take_along_axis(only, jnp.minimum(tokens, only.shape[2] - 1), axis=2) | (tokens >= only.shape[2])
    return dataclasses.replace(memory, stored=memory.stored & wanted, attended=memory.attended & wanted)


def _by_token(mass: Float[Array, "B N _e"], tokens: Int[Array, "B K _e"], most: int) -> Float[Array, "B E"]:
    """Head-mean attention by token: the prompt's, then the new ones."""
    batch, heads, entries = mass.shape
    mass = jnp.sum(mass.reshape(batch, tokens.shape[1], -1, entries), axis=2) / heads
    return jnp.zeros((batch, most)).at[jnp.arange(batch)[:, None, None], tokens].add(mass, mode="drop")
