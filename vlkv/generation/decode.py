"""Decoding with a cache: `decode_step`, the loop `decode`, and the generator `decode_steps`.

Axes: B batch · S new tokens · D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from vlkv.cache.pool import PackedCache, most_used
from vlkv.cache.reselection import note
from vlkv.compression.filling import Prompt
from vlkv.compression.reselecting import has_capacity, recompress, with_capacity
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.rules import add_ids
from vlkv.generation.sampling import Greedy
from vlkv.generation.step import feed
from vlkv.inputs import Inputs, single_key


def decode_step(
    params: Model, cache: PackedCache, token: Int[Array, " B"]
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Adds one token per row; returns the cache with it and the logits of the next token. The cache may be donated.

    Raises:
        InputError: the cache has no slot or the model no position for it. Under jit, where this is unknown, the logits
            of a row without capacity in the cache are NaN.
    """
    check_new_room(params.config, cache, 1)
    return _step(params, with_capacity(cache, 1), token)


def _step(params: Model, cache: PackedCache, token: Int[Array, " B"]) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """`decode_step` for a cache that has capacity."""
    embedded, position = params.embed_text(token[:, None]), cache.next_position[:, None]
    text = jnp.zeros((len(token), 1), bool)
    cache = note(cache, position, ~text, is_vision=text)
    cache, x = feed(params.decoder, cache, embedded.x, position, added=embedded.added)
    ids = add_ids(cache.history, token[:, None])
    cache = dataclasses.replace(cache, next_position=cache.next_position + 1, history=ids)
    return cache, logits_after(params, cache, x[:, 0])


def logits_after(params: Model, cache: PackedCache, x: Float[Array, "B D"]) -> Float[Array, "B vocab"]:
    """Logits from the last layer's output; NaN in rows with more tokens than the cache or its rotation allows."""
    exceeded = cache.used > cache.new_tokens
    if cache.position_limit is not None:
        exceeded |= jnp.max(cache.next_position, axis=1) > cache.position_limit
    if cache.reselection is not None and cache.history is not None:
        exceeded |= cache.history[:, -1] >= 0
    return jnp.where(exceeded[:, None], jnp.nan, params.decoder.logits(x))


class _Decoding(NamedTuple):
    """What `decode` carries from step to step, after `step` tokens of every row."""

    step: Int[Array, ""]
    cache: PackedCache
    tokens: Int[Array, "B S"]
    ended: Bool[Array, " B"]
    lengths: Int[Array, " B"]


def decode(
    params: Model,
    cache: PackedCache,
    logits: Float[Array, "B vocab"],
    *,
    sampling: Greedy,
    key: PRNGKeyArray | None = None,
    begun: Int[Array, "B m"] | None = None,
) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
    """Decodes from a prompt's cache and logits until every row has ended, in one `while_loop`.

    A row also ends if its logits are NaN, because the model gives NaN, or because `extend` has left too little capacity
    for the answer. Then its last token is -1.

    Args:
        params: the model.
        cache: of the prompt, and of the tokens of `begun`.
        logits: of the next token.
        sampling: chooses the tokens.
        key: for `Sample`.
        begun: the first tokens of the answer, as this function returns them; None: there are none.

    Returns:
        All tokens of the answer, and the number of tokens of each row, including the stop token or -1. A row that has
        ended repeats its last token.

    Raises:
        InputError: the cache has too few slots or the model too few positions for `max_new_tokens`. Under jit, only the
            capacity of the cache is checked, without earlier new tokens.
    """
    tokens, lengths, _ = decode_in(params, cache, logits, sampling=sampling, key=key, begun=begun)
    return tokens, lengths


def decode_in(
    params: Model,
    cache: PackedCache,
    logits: Float[Array, "B vocab"],
    *,
    sampling: Greedy,
    key: PRNGKeyArray | None,
    begun: Int[Array, "B m"] | None,
) -> tuple[Int[Array, "B S"], Int[Array, " B"], PackedCache]:
    """`decode` that also returns the cache, so that a jitted form can write into the memory of a donated one."""
    key, sampling = sampling.require_key(single_key(key)), sampling.filled(params.config)
    begun = jnp.zeros((logits.shape[0], 0), jnp.int32) if begun is None else begun
    # The last token is not added to the cache, because no token follows it.
    check_new_room(params.config, cache, sampling.max_new_tokens - begun.shape[1] - 1)
    stop = jnp.asarray(sampling.stop, jnp.int32)

    def append(state: _Decoding, logits: Array) -> _Decoding:
        token, ended = choose_token(logits, sampling, key, state.step, state.cache.history), state.ended
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, axis=1)
        return _Decoding(state.step + 1, state.cache, tokens, ended | _is_last(token, stop), state.lengths + ~ended)

    def unfinished(state: _Decoding) -> Array:
        return (state.step < sampling.max_new_tokens) & ~jnp.all(state.ended)

    def step(state: _Decoding) -> _Decoding:
        previous = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1, keepdims=False)
        cache, logits = _step(params, state.cache, previous)
        return append(state._replace(cache=cache), logits)

    start = _begin(cache, begun, sampling.max_new_tokens, stop)
    state = _loop(unfinished, step, append(start, logits))
    # After its end, a row has tokens of steps that ran for other rows: they are replaced by its last token.
    place = jnp.arange(sampling.max_new_tokens)
    last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    return jnp.where(place < state.lengths[:, None], state.tokens, last), state.lengths, state.cache


def _loop(unfinished: Callable[..., Array], step: Callable[..., _Decoding], state: _Decoding) -> _Decoding:
    """Decodes until every row has ended. Selects the entries of the cache again whenever it is full.

    This happens in an outer loop, because XLA might copy the pool in every step of a loop that contains it.
    """
    if state.cache.reselection is None:
        return jax.lax.while_loop(unfinished, step, state)

    def steps(state: _Decoding) -> _Decoding:
        state = state._replace(cache=with_capacity(state.cache, 1))
        return jax.lax.while_loop(lambda state: unfinished(state) & has_capacity(state.cache, 1), step, state)

    return jax.lax.while_loop(unfinished, steps, state)


def _begin(cache: PackedCache, begun: Int[Array, "B m"], new_tokens: int, stop: Int[Array, " n"]) -> _Decoding:
    """The state of the loop after the tokens `begun`."""
    ends = jnp.cumsum(_is_last(begun, stop), axis=1) > 0
    ended = jnp.any(ends, axis=1)
    lengths = jnp.sum(~ends, axis=1, dtype=jnp.int32) + ended
    tokens = jnp.pad(begun, [(0, 0), (0, new_tokens - begun.shape[1])])
    return _Decoding(jnp.int32(begun.shape[1]), cache, tokens, ended, lengths)


def _is_last(token: Int[Array, "*B"], stop: Int[Array, " n"]) -> Bool[Array, "*B"]:
    return jnp.isin(token, stop) | (token < 0)


def decode_steps(
    params: Model,
    cache: PackedCache,
    logits: Float[Array, "B vocab"],
    *,
    sampling: Greedy,
    key: PRNGKeyArray | None = None,
    begun: Int[Array, "B m"] | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Decodes like `decode`, and yields the tokens of each step. The cache is donated.

    Rows that have ended repeat their last token: a stop token, or -1 if their logits are NaN.

    Raises:
        InputError: as `decode`, before the first token.
    """
    first = np.zeros((logits.shape[0], 0), np.int32) if begun is None else np.asarray(begun)
    check_new_room(params.config, cache, sampling.max_new_tokens - first.shape[1] - 1)
    key, sampling = sampling.require_key(single_key(key)), sampling.filled(params.config)
    stop = (-1, *(sampling.stop or ()))
    ended, tokens = np.zeros(len(first), bool), np.zeros(len(first), np.int32)
    for i in range(sampling.max_new_tokens):
        if i < first.shape[1]:
            token = first[:, i]
        elif i == first.shape[1]:
            token = np.asarray(choose_token(logits, sampling, key, i, cache.history))
        else:
            cache, following = next_token(params, cache, tokens, sampling, key, i)
            token = np.asarray(following)
        tokens = np.where(ended, tokens, np.asarray(token))
        yield tokens
        ended = np.isin(tokens, stop)
        if ended.all():
            return


@jax.jit
def choose_token(
    logits: Float[Array, "B vocab"],
    sampling: Greedy,
    key: Key[Array, ""] | None,
    step: int | Array,
    ids: Int[Array, "B _s"] | None,
) -> Int[Array, " B"]:
    """Applies the rules and chooses the next token of each row; -1 if its logits are NaN or infinite.

    Args:
        logits: of the next token.
        sampling: `Greedy.filled` from the model's config.
        key: for `Sample`.
        step: number of tokens of the answer so far.
        ids: `history` of the cache.
    """
    assert sampling.rules is not None and sampling.stop is not None, "fill in the checkpoint's settings first"
    allowed = sampling.rules.apply(logits, ids, step=step, last=sampling.max_new_tokens - 1, stop=sampling.stop)
    token = sampling.choose(allowed, None if key is None else jax.random.fold_in(key, step))
    return jnp.where(jnp.all(jnp.isfinite(logits), axis=-1), token, -1)


def next_token(
    params: Model,
    cache: PackedCache,
    token: Int[Array | np.ndarray, " B"],
    sampling: Greedy,
    key: Key[Array, ""] | None,
    step: int | Array,
) -> tuple[PackedCache, Int[Array, " B"]]:
    """Feeds a token to the cache, which is donated, and chooses the next one as `choose_token` does.

    A cache without a free slot is selected again first. The host decides, as in a program XLA would copy the pool.
    """
    if not has_capacity(cache, 1):
        cache = _recompress(cache)
    return _next_token(params, cache, token, sampling, key, step)


_recompress = jax.jit(recompress, donate_argnames="cache")


@partial(jax.jit, donate_argnames="cache")
def _next_token(
    params: Model,
    cache: PackedCache,
    token: Int[Array | np.ndarray, " B"],
    sampling: Greedy,
    key: Key[Array, ""] | None,
    step: int | Array,
) -> tuple[PackedCache, Int[Array, " B"]]:
    cache, logits = _step(params, cache, jnp.asarray(token))
    return cache, choose_token(logits, sampling.filled(params.config), key, step, cache.history)


def check_new_room(config: ModelConfig, cache: PackedCache, new_tokens: int) -> None:
    """Raises InputError if the cache has no capacity, or the model no positions, for `new_tokens` more.

    Under jit, earlier tokens are not counted, and positions are not checked.
    """
    most, used = cache.new_tokens, most_used(cache) or 0
    if used + new_tokens > most:
        raise InputError(
            f"the cache has capacity for {most} new tokens, {used} of them used, and {new_tokens} more are needed: "
            f"prefill with a larger new_tokens, or use vlkv.cache.resize(cache, {used + new_tokens})"
        )
    check_positions(config, cache, new_tokens)


def check_positions(config: ModelConfig, cache: PackedCache, more: int | Int[np.ndarray, " B"]) -> None:
    """Raises InputError if `more` tokens in each row exceed the model's positions, or those of `check_rotation`."""
    end, limit = _end(cache, more), config.decoder.max_positions
    if end is not None and end.max() > limit:
        raise InputError(
            f"the conversation would have {end.max()} tokens, the model's limit is {limit}: start a new one, or ask "
            "for a shorter answer"
        )
    check_rotation(cache, more)


def check_rotation(keys: PackedCache | Prompt, more: int | Int[np.ndarray, " B"]) -> None:
    """Raises InputError if `more` tokens in each row exceed the positions for which long-RoPE rotated the keys.

    Under jit, nothing is checked: then the logits of such a row are NaN.
    """
    end = _end(keys, more)
    if keys.position_limit is None or end is None or isinstance(keys.position_limit, jax.core.Tracer):
        return
    limit = np.asarray(keys.position_limit, np.int64)
    row = int(np.argmax(end - limit))
    if end[row] > limit[row]:
        raise InputError(
            f"{end[row]} tokens need long-RoPE's long factors, but the keys are rotated for at most {limit[row]} "
            "tokens: prefill again with a larger new_tokens (--max-new-tokens)"
        )


def _end(keys: PackedCache | Prompt, more: int | Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"] | None:
    """The position after `more` tokens in each row; None if it is unknown: under jit, or if another host has rows."""
    position = keys.next_position
    if isinstance(position, jax.core.Tracer) or (isinstance(position, jax.Array) and not position.is_fully_addressable):
        return None
    return np.asarray(position).max(axis=1) + more


def check_room(config: ModelConfig, inputs: Inputs, new_tokens: int) -> None:
    """Raises InputError if prompt and answer together exceed the model's positions.

    If the length of the prompt is unknown (see `Inputs.lengths`), only `new_tokens` is checked.
    """
    limit = config.decoder.max_positions
    if new_tokens >= limit:
        raise InputError(
            f"max_new_tokens={new_tokens} leaves no room for a prompt: the model's limit is {limit} positions"
        )
    if (lengths := inputs.lengths) is not None and (longest := int(lengths.max())) + new_tokens > limit:
        raise InputError(f"a prompt of {longest} tokens and {new_tokens} new ones exceed the model's limit of {limit}")
