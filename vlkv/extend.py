"""`extend`: another turn of a conversation, or another question about what a cache holds.

    cache, logits = prefill(params, first, policy, new_tokens=200)
    tokens, lengths = decode(params, cache, logits, sampling=Greedy(max_new_tokens=64))
    cache, logits = extend(params, cache, second)     # the answer and the next question; images too
    tokens, lengths = decode(params, cache, logits, sampling=Greedy(max_new_tokens=64))

New tokens are entries like generated ones: of a method that does not act while decoding they are never compressed, and
the pool stays as it is. So there must be room for them from the start (`new_tokens` of `prefill`): a tail does not grow
by itself, because every size of it would be compiled anew.

Axes: B batch · T new tokens, padded · N, K heads · H head dim · D width · S tail slots · A position axes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from vlkv.cache import PackedCache
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.feeding import feed
from vlkv.generate import logits_after
from vlkv.inputs import Inputs


def extend(params: Model, cache: PackedCache, inputs: Inputs) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Feeds whole texts, of unequal length and with images if need be, to a cache that has been filled.

    Methods that act while decoding act after every token here too, one by one; new images count as text for them. The
    others read all tokens together.

    Args:
        params: the model.
        cache: of `prefill` or of `extend`, with room for these tokens and for the answer. `decode` returns
            no cache: the answer that it gave is fed again, at the head of `inputs`.
        inputs: a row for each of the cache's, padded on either side; positions count on from `cache.next_position`.

    Returns:
        The cache with the new tokens, and the logits of the token after them.

    Raises:
        InputError: a batch of another size; or where it is known (under jit it is not) too little room in the cache or
            in the model. Under jit the logits of a row that finds no room are NaN.
    """
    _check(params, cache, inputs)
    inputs = jax.tree.map(jnp.asarray, inputs)
    positions = cache.next_position[:, None] + inputs.positions
    fed, x = feed(params.decoder, cache, params.embed(inputs), positions, inputs.valid)
    # The greatest of all axes: after an image M-RoPE goes on from there.
    furthest = jnp.max(jnp.where(inputs.valid[..., None], positions, -1), axis=(1, 2))
    fed = dataclasses.replace(fed, next_position=jnp.broadcast_to(furthest[:, None] + 1, cache.next_position.shape))
    last = jnp.max(jnp.where(inputs.valid, jnp.arange(x.shape[1]), 0), axis=1)
    return fed, logits_after(params, fed, x[jnp.arange(len(last)), last])


def _check(params: Model, cache: PackedCache, inputs: Inputs) -> None:
    room, batch = cache.new_tokens, cache.used.shape[0]
    if inputs.tokens.shape[0] != batch:
        raise InputError(f"the cache has {batch} rows, the inputs {inputs.tokens.shape[0]}: extend needs one for each")
    if not isinstance(inputs.valid, np.ndarray) or isinstance(cache.used, jax.core.Tracer):
        return
    counts = inputs.valid.sum(axis=1)
    need = int((np.asarray(cache.used) + counts).max())
    if need > room:
        raise InputError(
            f"the cache has room for {room} new tokens, and {need} are needed before the answer: prefill with "
            f"new_tokens={need} and as many more as the answer may have"
        )
    limit, end = params.config.decoder.max_positions, np.asarray(cache.next_position).max(axis=1) + counts
    if end.max() > limit:
        raise InputError(f"the conversation would have {end.max()} tokens, the model's limit is {limit}")
