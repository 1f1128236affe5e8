"""`extend` adds text or images to a cache: another turn of a conversation, or another question about an image.

    cache, logits = prefill(params, first, policy, new_tokens=200)
    tokens, lengths = decode(params, cache, logits, sampling=Greedy(max_new_tokens=64))
    cache, logits = extend(params, cache, second)     # the answer and the next question; images too
    tokens, lengths = decode(params, cache, logits, sampling=Greedy(max_new_tokens=64))

New tokens are stored like generated ones. Only methods that evict while decoding compress them. So the cache must have
capacity for them from the start (`new_tokens` of `prefill`, or `cache.resize`). It does not grow by itself, because
every size must be compiled.

Axes: B batch · T new tokens, padded · D width · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.cache.pool import PackedCache
from vlkv.cache.reselection import grid_after, note
from vlkv.compression.policy import Policy
from vlkv.compression.reselecting import with_capacity
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.compression.tokens import Tokens
from vlkv.decoder import Decoder
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.families.family import Embedded
from vlkv.generation.decode import check_positions, logits_after
from vlkv.generation.rules import add_ids, token_ids
from vlkv.generation.step import feed
from vlkv.inputs import Inputs
from vlkv.masks import end_of


def extend(
    params: Model, cache: PackedCache, inputs: Inputs | Mapping[str, Any], reduce: Policy | None = None
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Adds texts, which may contain images and differ in length, to a cache.

    Methods with a decode state process the tokens one by one, and treat new images as text. KIVI with a `window` also
    processes the tokens one by one, the others all together. One by one, an image cannot be added if its tokens attend
    to each other in both directions.

    Args:
        params: the model.
        cache: from `prefill` or `extend`, with capacity for these tokens and the answer. `decode` does not return a
            cache, so its answer must be at the start of `inputs`.
        inputs: as in `prefill`; one row per row of the cache, whose positions continue at `cache.next_position`.
        reduce: a method that reduces prompts before the decoder, such as `EVS(keep=0.25)`: vision tokens that it drops
            are not added; None: all are.

    Returns:
        The cache with the new tokens, and the logits of the token after them.

    Raises:
        InputError: another batch size, an image that cannot be added, or another `reduce`; outside jit, also too little
            capacity in the cache or the model. Under jit, the numbers of tokens are unknown: the model's limit is not
            checked, and the logits of a row without capacity in the cache are NaN.
    """
    inputs = Inputs.of(inputs, params.config)
    _check(params, cache, inputs)
    arrays: Inputs = jax.tree.map(jnp.asarray, inputs)
    positions = cache.next_position[:, None] + arrays.positions
    embedded, kept = (params.embed(arrays), arrays) if reduce is None else _reduced(params, arrays, reduce)
    until = params.decoder.until(arrays.is_vision) if arrays.max_vision else None
    fed, x = _feed(params.decoder, cache, kept, embedded, positions, until)
    next_position = jnp.broadcast_to(end_of(positions, arrays.valid)[:, None], cache.next_position.shape)
    ids = add_ids(cache.history, token_ids(params.config, arrays), arrays.valid)
    fed = dataclasses.replace(fed, next_position=next_position, history=ids)
    last = jnp.max(jnp.where(kept.valid, jnp.arange(x.shape[1]), 0), axis=1)
    return fed, logits_after(params, fed, x[jnp.arange(len(last)), last])


def _reduced(params: Model, inputs: Inputs, policy: Policy) -> tuple[Embedded, Inputs]:
    """The embedded tokens, and the inputs in which those that a method drops are padding."""
    reducer = slots_of(policy).reduce
    if reducer is None or reducer.reductions(params.decoder.full_layers) != (0,):
        raise InputError(f"reduce={type(policy).__name__}: give a method that reduces prompts before the decoder, such "
                         "as EVS or VidCom2")  # fmt: skip
    embedded = params.embed(inputs, stage_of(reducer, "class_attention_layers"))
    tokens = Tokens.of(inputs, *embedded)
    tokens, kept = jax.vmap(lambda tokens: reducer.reduce(tokens, None, stage=0))(tokens)
    embedded = embedded._replace(x=tokens.x, added=tokens.added)
    return embedded, dataclasses.replace(inputs, valid=inputs.valid & kept)


def _feed(
    decoder: Decoder,
    cache: PackedCache,
    inputs: Inputs,
    embedded: Embedded,
    positions: Int[Array, "B T A"],
    until: Int[Array, "B T"] | None,
) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """`feed` in parts that fit into the tail, if the entries of the cache are selected again when it is full."""
    again, (_, length) = cache.reselection, inputs.valid.shape
    if again is None:
        return feed(decoder, cache, embedded.x, positions, inputs.valid, embedded.added, until)
    added = None if embedded.added is None else jnp.moveaxis(embedded.added, 1, -2)  # [B, T, S, D]
    size = min(length, again.tail)

    def parts(x: Array) -> Array:  # [B, T, ...] -> [parts, B, size, ...]
        x = jnp.pad(x, [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    def feed_part(cache: PackedCache, part: tuple[Any, ...]) -> tuple[PackedCache, Array]:
        x, positions, valid, is_vision, grid, added = part
        cache = with_capacity(cache, jnp.sum(valid, axis=1))
        cache = note(cache, positions, valid, is_vision, grid)
        return feed(decoder, cache, x, positions, valid, None if added is None else jnp.moveaxis(added, -2, 1))

    arrays = embedded.x, positions, inputs.valid, inputs.is_vision, grid_after(cache, inputs.grid), added
    cache, x = jax.lax.scan(feed_part, cache, jax.tree.map(parts, arrays))
    return cache, jnp.moveaxis(x, 0, 1).reshape(len(inputs.valid), -1, x.shape[-1])[:, :length]


def _check(params: Model, cache: PackedCache, inputs: Inputs) -> None:
    capacity, batch = cache.new_tokens, cache.used.shape[0]
    if inputs.tokens.shape[0] != batch:
        raise InputError(f"the cache has {batch} rows, but the inputs have {inputs.tokens.shape[0]}")
    if params.decoder.image_block and inputs.max_vision and (cache.one_by_one or cache.reselection is not None):
        raise InputError(
            "this cache takes new tokens in parts, but image tokens of this model attend to each other in both "
            "directions: give all images in the first prompt, or use a method that does not evict while decoding"
        )
    counts = inputs.lengths
    if counts is None or isinstance(cache.used, jax.core.Tracer):
        return
    need = int((np.asarray(cache.used) + counts).max())
    if need > capacity:
        raise InputError(
            f"the cache has capacity for {capacity} new tokens, and {need} are needed before the answer: prefill with "
            f"new_tokens={need} plus the length of the answer, or use vlkv.cache.resize"
        )
    check_positions(params.config, cache, counts)
