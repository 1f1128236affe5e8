"""`extend`: another turn of a conversation, or another question about what a cache holds.

    cache, logits = prefill(params, first, policy, new_tokens=200)
    tokens, lengths = decode(params, cache, logits, sampling=Greedy(max_new_tokens=64))
    cache, logits = extend(params, cache, second)     # the answer and the next question; images too
    tokens, lengths = decode(params, cache, logits, sampling=Greedy(max_new_tokens=64))

The pool stays as it is. New tokens go to the tail, are never compressed, and attend as generated ones do: to what the
cache holds, to the tail, and to one another in order. So the tail must be large enough from the start (`new_tokens` of
`prefill`): it does not grow, because every size of it would be compiled anew.

Axes: B batch · T new tokens, padded · N, K heads · H head dim · D width · S tail slots · A position axes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.cache import PackedCache, write
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generate import feed, logits_after
from vlkv.inputs import Inputs
from vlkv.parallel import cached_attention


def extend(params: Model, cache: PackedCache, inputs: Inputs) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Feeds whole texts, of unequal length and with images if need be, to a cache that has been filled.

    Methods that act while decoding act after every token here too, one by one; new images count as text for them. The
    others read all tokens together.

    Args:
        params: the model.
        cache: of `prefill` or of `extend`, with room in its tail for these tokens and for the answer. `decode` returns
            no cache: the answer that it gave is fed again, at the head of `inputs`.
        inputs: a row for each of the cache's, padded on either side; positions count on from `cache.next_position`.

    Returns:
        The cache with the new tokens, and the logits of the token after them.

    Raises:
        InputError: a batch of another size; or where it is known (under jit it is not) too little room in the tail or
            in the model. Under jit the logits of a row that finds no room are NaN.
    """
    _check(params, cache, inputs)
    inputs = jax.tree.map(jnp.asarray, inputs)
    positions = cache.next_position[:, None] + inputs.positions
    read = _together if cache.policy is None else _one_by_one
    fed, x = read(params, cache, params.embed(inputs), positions, inputs.valid)
    # The greatest of all axes: after an image M-RoPE goes on from there.
    furthest = jnp.max(jnp.where(inputs.valid[..., None], positions, -1), axis=(1, 2))
    fed = dataclasses.replace(fed, next_position=jnp.broadcast_to(furthest[:, None] + 1, cache.next_position.shape))
    last = jnp.max(jnp.where(inputs.valid, jnp.arange(x.shape[1]), 0), axis=1)
    return fed, logits_after(params, fed, x[jnp.arange(len(last)), last])


def _together(
    params: Model,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"],
) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """All tokens through one layer after the other."""
    tail_k, tail_v = list(cache.tail_k), list(cache.tail_v)
    seen = cache.used[:, None] + jnp.cumsum(valid, axis=1)  # [B, T] slots of the tail that a token sees, its own too
    slot = jnp.where(valid, seen - 1, tail_k[0].shape[1])  # padding: past the end, not written
    rotation = params.decoder.rotation(positions)
    for i, layer in enumerate(params.decoder.layers):
        q, k, v = layer.project(x, rotation)
        tail_k[i], tail_v[i] = write(tail_k[i], k, slot, cache.parts), write(tail_v[i], v, slot, cache.parts)
        segment = cache.k, cache.v, cache.start[i], cache.length[i]
        # Many queries at once are matrix products, not the one row that the kernels of decoding are made for.
        attended = cached_attention(
            q, segment, (tail_k[i], tail_v[i]), seen, softmax_n=cache.softmax_n, parts=cache.parts,
            implementation="xla",
        )  # fmt: skip
        x = layer.finish(x, attended.astype(x.dtype))
    used = cache.used + jnp.sum(valid, axis=1, dtype=jnp.int32)
    return dataclasses.replace(cache, tail_k=tuple(tail_k), tail_v=tuple(tail_v), used=used), x


def _one_by_one(
    params: Model,
    cache: PackedCache,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T A"],
    valid: Bool[Array, "B T"],
) -> tuple[PackedCache, Float[Array, "B T D"]]:
    """One token after the other through all layers."""

    def step(cache: PackedCache, token: tuple[Array, ...]) -> tuple[PackedCache, Array]:
        x, positions, valid = token
        fed, out = feed(params, cache, x, positions)

        def only_valid(new: Array, old: Array) -> Array:
            return jnp.where(valid.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        # What padding has written lies behind the slots in use, where the next token overwrites it.
        used, memory = jax.tree.map(only_valid, (fed.used, fed.memory), (cache.used, cache.memory))
        return dataclasses.replace(fed, used=used, memory=memory), out

    cache, out = jax.lax.scan(step, cache, tuple(jnp.swapaxes(a, 0, 1) for a in (x, positions, valid)))
    return cache, jnp.swapaxes(out, 0, 1)


def _check(params: Model, cache: PackedCache, inputs: Inputs) -> None:
    room, batch = cache.tail_k[0].shape[:2][::-1]
    if inputs.tokens.shape[0] != batch:
        raise InputError(f"the cache has {batch} rows, the inputs {inputs.tokens.shape[0]}: extend needs one for each")
    if not isinstance(inputs.valid, np.ndarray) or isinstance(cache.used, jax.core.Tracer):
        return
    counts = inputs.valid.sum(axis=1)
    need = int((np.asarray(cache.used) + counts).max())
    if need > room:
        raise InputError(
            f"the tail has {room} slots, and {need} are needed before the answer: prefill with new_tokens={need} and "
            "as many more as the answer may have"
        )
    limit, end = params.config.decoder.max_positions, np.asarray(cache.next_position).max(axis=1) + counts
    if end.max() > limit:
        raise InputError(f"the conversation would have {end.max()} tokens, the model's limit is {limit}")
