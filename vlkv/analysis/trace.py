"""Decodes given tokens and records for every layer its hidden states, its attention and its number of entries.

Axes: B batch · S given tokens · L layers · D width · N query heads · K key heads · T prompt · E = T + capacity for new
tokens · _e entries of a decode state. Attention is recorded per token, not per slot, so that traces of different caches
can be compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache.decode_state import DecodeState, begin, packed
from vlkv.cache.pool import PackedCache
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.prompt import Prompt
from vlkv.generation.step import feed_and_watch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The measurements of every step."""

    logits: Float[Array, "*S B vocab"]  # after each given token
    hidden: Float[Array, "*S L B D"]  # after each layer
    mass: Float[Array, "*S L B E"]  # share of attention that each token receives, mean over heads (A-VL, Eq. 1)
    stored: Float[Array, "*S L B"]  # entries in memory, mean over key heads
    used: Float[Array, "*S L B"]  # entries attended to, mean over key heads


def follow(
    params: Model,
    prompt: Prompt,
    cache: PackedCache,
    tokens: Int[Array | np.ndarray, "B S"],
) -> Trace:
    """Decodes the given tokens one by one, as `decode_step` does, and records every layer.

    Args:
        params: the model.
        prompt: the prompt of the cache.
        cache: from any policy, with capacity for the tokens.
        tokens: the tokens; padding, -1, is replaced by token 0.

    Raises:
        InputError: no layer has full attention, so there is nothing to record.
    """
    if not params.decoder.full_layers:
        raise InputError(
            "all layers of this model have a sliding window, so there is no attention to a cache to record"
        )
    state = _decode_state(prompt, cache)

    def step(cache: PackedCache, token: Int[Array, " B"]) -> tuple[PackedCache, Trace]:
        def record(i: int, state: DecodeState, mass: Array, x: Array) -> tuple[Array, ...]:
            by_token = _by_token(mass, _tokens(state, prompt.valid), prompt.valid.shape[1] + cache.new_tokens)
            return x[:, 0], by_token, *(jnp.mean(jnp.sum(m, axis=-1), axis=-1) for m in (state.stored, state.attended))

        embedded, positions = params.embed_text(token[:, None]), cache.next_position[:, None]
        cache, x, layers = feed_and_watch(params.decoder, cache, embedded.x, positions, record, embedded.added)
        hidden, mass, stored, used = (jnp.stack(column) for column in zip(*layers, strict=True))
        return dataclasses.replace(cache, next_position=cache.next_position + 1), Trace(
            logits=params.decoder.logits(x[:, 0]), hidden=hidden, mass=mass, stored=stored, used=used,
        )  # fmt: skip

    assert tokens.shape[0] == prompt.valid.shape[0]
    fed = jnp.maximum(jnp.asarray(tokens), 0).T
    return jax.lax.scan(step, dataclasses.replace(cache, decode_states=state), fed)[1]


def _decode_state(prompt: Prompt, cache: PackedCache) -> tuple[DecodeState, ...]:
    """The decode state of the cache. If its policy has none, one that only lists the entries of the cache."""
    if cache.decode_states is not None:
        return cache.decode_states

    most = prompt.valid.shape[1]

    def row_state(token: Any, slots: Any, is_vision: Any, valid: Any) -> DecodeState:
        kept = jnp.zeros((len(token), most), bool).at[jnp.arange(len(token))[:, None], token].max(token >= 0)
        state = begin(kept, {}, is_vision, valid, jnp.sum(valid), new_tokens=0)
        return packed(state, token, slots, new_tokens=cache.new_tokens, reuses=False)

    return tuple(
        jax.vmap(row_state)(cache.entries(i, most), cache.extent[i], prompt.is_vision, prompt.valid)
        for i in range(cache.start.shape[0])
    )


def _tokens(state: DecodeState, valid: Bool[Array, "B T"]) -> Int[Array, "B K E"]:
    """The token of each entry: its index in the prompt, or T + n for the n-th new token."""
    length, count = valid.shape[1], jnp.sum(valid, axis=1)[:, None, None]
    order = jnp.argsort(~valid, axis=1, stable=True)[:, None]
    of_prompt = jnp.take_along_axis(order, jnp.minimum(state.place, length - 1), axis=2)
    return jnp.where(state.place < count, of_prompt, length + state.place - count)


def _by_token(mass: Float[Array, "B N _e"], tokens: Int[Array, "B K _e"], most: int) -> Float[Array, "B E"]:
    """Attention per token, mean over heads: first the prompt's tokens, then the new ones. E is `most`."""
    batch, heads, entries = mass.shape
    mass = jnp.sum(mass.reshape(batch, tokens.shape[1], -1, entries), axis=2) / heads
    return jnp.zeros((batch, most)).at[jnp.arange(batch)[:, None, None], tokens].add(mass, mode="drop")
