"""Prefill: the prompt through the model, then the policy's choice, then one packed cache.

Two halves, so that one reading of a prompt can be compressed in many ways (`read_prompt`, `fill_cache`); inside one
jit, as in `prefill` and `generate`, XLA observes each layer as soon as it has run and frees its queries.

Axes: B batch · T prompt · t tokens of one layer · L layers · N, K heads · H head dim · A position axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from vlkv.cache import PackedCache, pack
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.memory import Memory, begin
from vlkv.models import Model
from vlkv.policies.policy import Policy
from vlkv.policies.selection import Observed, allocate_and_take, observe, require_fit, see
from vlkv.reading import LayerPrompt, Prompt, read_prompt


def prefill(
    params: Model, inputs: Inputs, policy: Policy, *, new_tokens: int, key: Key[Array, ""] | None = None
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Runs the prompt, lets the policy choose, and packs what stays.

    Args:
        params: the model.
        inputs: from the processor.
        policy: decides what stays.
        new_tokens: slots of the tail, the most tokens that may follow.
        key: for policies that draw at random.

    Returns:
        The cache, and the logits of the first new token, which nothing evicted has touched.

    Raises:
        InputError: no key where the policy needs one, or it does not fit the model; before anything is traced.
    """
    prompt = read_prompt(params, inputs, policy, key=key)
    return fill_cache(prompt, policy, new_tokens=new_tokens, key=key), prompt.logits


def fill_cache(prompt: Prompt, policy: Policy, *, new_tokens: int, key: Key[Array, ""] | None = None) -> PackedCache:
    """What the policy keeps of a prompt, packed, with room for `new_tokens`.

    Raises:
        InputError: no key where the policy needs one, or a prompt that another policy has shortened.
    """
    layers, (batch, length) = len(prompt.layers), prompt.valid.shape
    require_fit(policy, layers, key)
    if policy.reducer != prompt.reducer:
        raise InputError(
            f"{type(policy).__name__} and the prompt do not fit: read_prompt must be given the same policy"
        )
    keys = None if key is None else jax.random.split(key, batch)
    # A policy sees heads first.
    kv = [(jnp.swapaxes(r.k, 1, 2), jnp.swapaxes(r.v, 1, 2)) for r in prompt.layers]

    def look(i: int, read: LayerPrompt) -> Observed:
        def row(q: Any, k: Any, v: Any, is_vision: Any, valid: Any, stays: Any, key: Any) -> Observed:
            return observe(policy, see(
                policy, q, k, v, is_vision, valid, key, layer=i, layers=layers,
                max_instruction=prompt.max_instruction, stays=stays,
            ))  # fmt: skip

        return jax.vmap(row)(jnp.swapaxes(read.q, 1, 2), *kv[i], read.is_vision, read.valid, read.stays, keys)

    observed = tuple(look(i, read) for i, read in enumerate(prompt.layers))
    is_vision, stays = (
        jnp.stack([_lengthen(getattr(read, name), length) for read in prompt.layers], axis=1)
        for name in ("is_vision", "stays")
    )  # [B, L, T]
    seen = jnp.sum(prompt.valid & prompt.is_vision if policy.scope == "vision" else prompt.valid, axis=1)
    selection = jax.vmap(lambda *row: allocate_and_take(policy, *row))(observed, is_vision, stays, seen)
    kept = [selection.kept[:, i, :, : k.shape[2]] for i, (k, _) in enumerate(kv)]
    scores = [selection.scores[:, i, :, : k.shape[2]] for i, (k, _) in enumerate(kv)]
    merged = [jax.vmap(policy.merge)(*kv[i], kept[i], scores[i]) for i in range(layers)]
    cache = pack(
        policy, tuple(m[0] for m in merged), tuple(m[1] for m in merged), tuple(kept),
        is_vision=tuple(read.is_vision for read in prompt.layers), source=tuple(read.source for read in prompt.layers),
        next_position=prompt.next_position, max_vision=prompt.max_vision, max_text=prompt.max_text,
        max_images=prompt.max_images, new_tokens=new_tokens,
    )  # fmt: skip
    if not policy.acts:
        return cache
    max_length = policy.layer_bound(layers=layers, vision=prompt.max_vision, text=prompt.max_text)

    def recall(token: Any, start: Any, length: Any, values: Any, is_vision: Any, valid: Any) -> Memory:
        made = begin(token, start, length, values, is_vision, valid, max_length=max_length, new_tokens=new_tokens)
        return policy.begin(made)

    memory = tuple(
        jax.vmap(recall)(
            cache.token, cache.start[i], cache.length[i], _by_source(observed[i].values, read, length),
            prompt.is_vision, prompt.valid,
        )
        for i, read in enumerate(prompt.layers)
    )  # fmt: skip
    return dataclasses.replace(cache, memory=memory, policy=policy)


def _lengthen(mask: Array, length: int) -> Array:
    return jnp.pad(mask, [(0, 0), (0, length - mask.shape[1])])


def _by_source(values: dict[str, Array], read: LayerPrompt, length: int) -> dict[str, Array]:
    """Numbers [B, K, t] of a layer's tokens as numbers [B, K, T] of the prompt's."""
    if read.valid.shape[1] == length:
        return values

    def spread(value: Float[Array, "K t"], source: Array) -> Float[Array, "K T"]:
        return jnp.zeros((value.shape[0], length), value.dtype).at[:, source].set(value)

    return {name: jax.vmap(spread)(value, read.source) for name, value in values.items()}
