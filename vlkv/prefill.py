"""Prefill: the prompt through the model, then the policy's choice, then one packed cache.

Two halves, so that one reading of a prompt can be compressed in many ways (`read_prompt`, `fill_cache`); inside one
jit, as in `prefill` and `generate`, XLA observes each layer as soon as it has run and frees its queries.

Axes: B batch · T prompt · L layers · N, K heads · H head dim · A position axes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from vlkv.attention import attention
from vlkv.cache import PackedCache, pack
from vlkv.inputs import Inputs
from vlkv.memory import Memory, begin
from vlkv.models import Model
from vlkv.policies.policy import Policy
from vlkv.policies.selection import Observed, allocate_and_take, observe, require_key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt that has been read: what every layer would put into a full cache, and the queries that judge it."""

    q: tuple[Float[Array, "B T N H"], ...]  # rotated; one per layer
    k: tuple[Float[Array, "B T K H"], ...]
    v: tuple[Float[Array, "B T K H"], ...]
    is_vision: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]
    next_position: Int[Array, "B A"]
    logits: Float[Array, "B vocab"]  # of the first new token
    max_vision: int = dataclasses.field(metadata={"static": True})
    max_text: int = dataclasses.field(metadata={"static": True})
    max_instruction: int = dataclasses.field(metadata={"static": True})


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
        InputError: no key where the policy needs one, before anything is traced.
    """
    require_key(policy, key)
    prompt = read_prompt(params, inputs)
    return fill_cache(prompt, policy, new_tokens=new_tokens, key=key), prompt.logits


def read_prompt(params: Model, inputs: Inputs) -> Prompt:
    """The prompt through all layers. Outside of one jit with `fill_cache` it holds all queries, keys and values."""
    inputs = jax.tree.map(jnp.asarray, inputs)
    x = params.embed(inputs)
    queries, keys, values = [], [], []
    for layer in params.decoder.layers:
        q, k, v = layer.project(x, inputs.positions)
        x = layer.finish(x, attention(q, k, v, valid=inputs.valid))
        queries.append(q)
        keys.append(k)
        values.append(v)
    place = jnp.arange(inputs.valid.shape[1])
    last = jnp.max(jnp.where(inputs.valid, place, 0), axis=1)
    return Prompt(
        q=tuple(queries), k=tuple(keys), v=tuple(values),
        is_vision=inputs.is_vision, valid=inputs.valid,
        next_position=jnp.max(jnp.where(inputs.valid[..., None], inputs.positions, -1), axis=1) + 1,
        logits=params.decoder.logits(x[jnp.arange(len(last)), last]),
        max_vision=inputs.max_vision, max_text=inputs.max_text, max_instruction=inputs.max_instruction,
    )  # fmt: skip


def fill_cache(prompt: Prompt, policy: Policy, *, new_tokens: int, key: Key[Array, ""] | None = None) -> PackedCache:
    """What the policy keeps of a prompt, packed, with room for `new_tokens`.

    Raises:
        InputError: no key where the policy needs one.
    """
    require_key(policy, key)
    layers, batch = len(prompt.k), prompt.valid.shape[0]
    keys = None if key is None else jax.random.split(key, batch)
    # [B, heads, T, H] from here on: a policy's stages see heads first.
    q, k, v = (tuple(jnp.swapaxes(x, 1, 2) for x in y) for y in (prompt.q, prompt.k, prompt.v))

    def look(layer: int, *row: Any) -> Observed:
        return observe(policy, *row, layer=layer, layers=layers, max_instruction=prompt.max_instruction)

    observed = tuple(
        jax.vmap(lambda *row, i=i: look(i, *row))(q[i], k[i], v[i], prompt.is_vision, prompt.valid, keys)
        for i in range(layers)
    )
    selection = jax.vmap(lambda *row: allocate_and_take(policy, *row))(observed, prompt.is_vision, prompt.valid)
    merged = [jax.vmap(policy.merge)(k[i], v[i], selection.kept[:, i], selection.scores[:, i]) for i in range(layers)]
    cache = pack(
        policy, tuple(m[0] for m in merged), tuple(m[1] for m in merged), selection.kept,
        is_vision=prompt.is_vision, next_position=prompt.next_position,
        max_vision=prompt.max_vision, max_text=prompt.max_text, new_tokens=new_tokens,
    )  # fmt: skip
    if not policy.acts:
        return cache
    max_length = policy.layer_bound(layers=layers, vision=prompt.max_vision, text=prompt.max_text)

    def recall(token: Array, start: Array, length: Array, values: dict, is_vision: Array, valid: Array) -> Memory:
        made = begin(token, start, length, values, is_vision, valid, max_length=max_length, new_tokens=new_tokens)
        return policy.begin(made)

    memory = tuple(
        jax.vmap(recall)(
            cache.token, cache.start[i], cache.length[i], observed[i].values, prompt.is_vision, prompt.valid
        )
        for i in range(layers)
    )
    return dataclasses.replace(cache, memory=memory, policy=policy)
