"""Prefill: runs the model over the prompt, selects entries with the policy, and packs them into one cache.

`prefill` observes each layer as soon as it has run, so that its queries can be freed. `read_prompt` and `fill_cache`
are the two halves of it, for compressing the same prompt in several ways.

Axes: B batch · T prompt · t tokens of one layer · L layers · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from pallas_kernels import Kernels
from pallas_kernels.cpu import unstacked
from vlkv.cache.decode_state import DecodeState, begin, packed
from vlkv.cache.history import lengthened
from vlkv.cache.packing import align, pack, without_segments
from vlkv.cache.pool import PackedCache, checked_new_tokens, entries
from vlkv.cache.rings import resize as resize_rings
from vlkv.compression.checking import require_fit, require_layers, require_policy
from vlkv.compression.policy import DecodingStages, Policy
from vlkv.compression.selection import allocate_and_take
from vlkv.compression.sizes import Budget, budget_of, cache_spec, counts_prompt
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.decoder.memory_maps import make_room
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.candidates import Candidates, Found, find, observer, stacked
from vlkv.generation.decode import check_rotation
from vlkv.generation.prompt import Prompt, read_layers
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.keys import single_key
from vlkv.sharding.ops import slot_parts


def prefill(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    policy: Policy,
    *,
    sampling: Greedy | None = None,
    new_tokens: int | Array | None = None,  # arrays get only a helpful error
    key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Runs the model over the prompt and makes a cache of the entries that the policy keeps.

    `jax.jit(prefill)` needs no static argument names with `sampling`; with `new_tokens`, this argument must be static.

    Args:
        params: the model.
        inputs: from the processor, or (outside jit) from the family's transformers processor.
        policy: selects the entries.
        sampling: its `max_new_tokens` is the capacity for new tokens; None: `Greedy()`. If its rules read earlier
            tokens, the cache has their ids.
        new_tokens: the capacity for new tokens, instead of that of `sampling`.
        key: for policies that draw at random.
        kernels: implementations of the ops, also for decoding with the cache; None: those of the platform.

    Returns:
        The cache, and the logits of the first new token, computed from the whole prompt unless the policy reduces it.

    Raises:
        InputError: the policy needs a key or does not fit the model, or new_tokens is less than 1. Raised before
            tracing.
    """
    inputs, key = Inputs.of(inputs, params.config), single_key(key)
    if isinstance(new_tokens, jax.Array):
        raise InputError(
            "new_tokens must be known to jit: give sampling=vlkv.Greedy(max_new_tokens=...) instead, or "
            'jax.jit(prefill, static_argnames="new_tokens")'
        )
    if new_tokens is None:
        new_tokens = (sampling or Greedy()).max_new_tokens
    assert not isinstance(new_tokens, jax.Array)
    new_tokens = checked_new_tokens(new_tokens)
    require_fit(policy, params.decoder.full_layers, key)
    return read_and_fill(params, inputs, policy, new_tokens, sampling=sampling, key=key, kernels=kernels)


def pool_slots(
    params: Model, inputs: Inputs | Mapping[str, Any], policy: Policy, *, new_tokens: int = Greedy().max_new_tokens
) -> int:
    """Slots that a cache of these prompts allocates per row and key head, in the pool, tails and rings of all layers.

    With a mesh (`jax.set_mesh`), it counts the slots of all its devices together.

    Args:
        params: the model; shapes (`jax.eval_shape`) are enough.
        inputs: from the processor, or from the family's transformers processor.
        policy: determines how many entries may be kept.
        new_tokens: capacity for generated tokens.

    Raises:
        InputError: the policy does not fit the model, or new_tokens is less than 1.
    """
    inputs, layers = Inputs.of(inputs, params.config), params.decoder.full_layers
    require_policy(policy)
    require_layers(policy, layers)
    spec = cache_spec(
        policy, layers=layers, vision=inputs.max_vision, text=inputs.max_text, images=inputs.max_images,
        placeless=inputs.max_placeless, new_tokens=checked_new_tokens(new_tokens),
        windows=params.config.decoder.sliding,
    )  # fmt: skip
    return spec.allocated(slot_parts(spec.columns(params.config.decoder.kv_heads)))


def read_and_fill(
    params: Model,
    inputs: Inputs,
    policy: Policy,
    new_tokens: int,
    *,
    sampling: Greedy | None,
    key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """`prefill` for callers that have checked the arguments."""
    layers = params.decoder.full_layers
    budget = _budget(policy, inputs, layers=layers)
    look = observer(policy, inputs, budget, layers=layers, key=key, kernels=kernels)
    prompt = read_layers(
        params, inputs, policy, look, sampling=sampling, new_tokens=new_tokens, key=key, kernels=kernels
    )
    cache = _fill(stacked(prompt.layers, inputs.valid.shape[1]), prompt, policy, budget, new_tokens)
    return _own_buffers(cache, prompt), prompt.logits


def fill_cache(prompt: Prompt, policy: Policy, *, new_tokens: int, key: PRNGKeyArray | None = None) -> PackedCache:
    """A cache of the prompt entries that the policy keeps, with capacity for `new_tokens`.

    Raises:
        InputError: the policy needs a key, another policy has reduced the prompt, or new_tokens is less than 1, or
            (for long-RoPE, outside jit) so much larger than that of `read_prompt` that rows need other factors.
    """
    return fill_cache_with(prompt, policy, None, new_tokens=new_tokens, key=key)


def fill_cache_with(
    prompt: Prompt,
    policy: Policy,
    budget: Budget | None,
    *,
    new_tokens: int,
    key: PRNGKeyArray | None = None,
) -> PackedCache:
    """`fill_cache` with the budget as arrays, so that one compiled program can be used for every keep.

    Stages get the budget as arguments. They must not use `self.keep` for anything else than bounds on sizes.

    Args:
        prompt: from `read_prompt`.
        policy: with the largest keep, for which memory is allocated.
        budget: `budget_of` the same policy with a smaller keep; None: that of `policy`.
        new_tokens: capacity for new tokens.
        key: for policies that draw at random.

    Raises:
        InputError: as `fill_cache`.
    """
    key = single_key(key)
    new_tokens = checked_new_tokens(new_tokens)
    require_fit(policy, len(prompt.layers), key)
    check_rotation(prompt, new_tokens)
    if slots_of(policy).reduce != prompt.reducer:
        raise InputError(f"{type(policy).__name__} and the prompt do not fit: give the same policy to read_prompt")
    if isinstance(prompt.valid, jax.core.Tracer):  # as in `Decoder.walk`
        make_room()
    return fill(prompt, policy, budget, new_tokens, key)


def fill(
    prompt: Prompt, policy: Policy, budget: Budget | None, new_tokens: int, key: Key[Array, ""] | None
) -> PackedCache:
    """`fill_cache_with` for callers that have checked the arguments."""
    budget = _budget(policy, prompt, layers=len(prompt.layers)) if budget is None else budget
    look = observer(policy, prompt, budget, layers=len(prompt.layers), key=key, kernels=prompt.kernels)
    found = find(look, prompt.layers, prompt.valid.shape[1], capped=policy.cap is not None)
    return _own_buffers(_fill(found, prompt, policy, budget, new_tokens), prompt)


def _budget(policy: Policy, bounds: Inputs | Prompt, *, layers: int) -> Budget:
    """The budget of a policy for prompts within these bounds."""
    return budget_of(policy, layers=layers, most=bounds.valid.shape[1], text=bounds.max_text)


def _fill(found: Found, prompt: Prompt, policy: Policy, budget: Budget, new_tokens: int) -> PackedCache:
    """Makes a cache from the candidates of all layers with full attention, and the prompt's rings and states."""
    rings = None if prompt.rings is None else resize_rings(prompt.rings, new_tokens)
    k, v, candidates = found
    if candidates is None:
        assert rings is not None
        cache = without_segments(rings.layers[0], prompt.next_position)
        return dataclasses.replace(cache, rings=rings, position_limit=prompt.position_limit, kernels=prompt.kernels,
                                   states=prompt.states, history=lengthened(prompt.history, new_tokens))  # fmt: skip
    prompt_count = jnp.sum(prompt.valid & prompt.is_vision if policy.scope == "vision" else prompt.valid, axis=1)
    choose = jax.vmap(partial(allocate_and_take, policy, budget=budget), in_axes=(1, 1, 1, 1, 0), out_axes=1)
    selection = choose(
        candidates.observed, candidates.is_vision, candidates.is_candidate, candidates.in_scope_count, prompt_count
    )
    merged, slots = [], slots_of(policy)
    for i, layer in enumerate(zip(k, v, strict=True)):
        kept, scores = (x[i, ..., : layer[0].shape[2]] for x in (selection.kept, selection.scores))  # [B, K, t]
        merged.append(layer if slots.merge is None else jax.vmap(stage_of(slots.merge, "merge"))(*layer, kept, scores))
    spec = cache_spec(
        policy, layers=len(k), vision=prompt.max_vision, text=prompt.max_text, images=prompt.max_images,
        placeless=prompt.max_placeless, new_tokens=new_tokens,
    )  # fmt: skip
    kept, requested, states = selection.kept, None, None
    if (updater := slots.step) is not None:
        counted = jnp.broadcast_to(prompt_count, candidates.in_scope_count.shape)
        counted = counted if counts_prompt(policy) else candidates.in_scope_count
        states, kept = _decode_states(updater, prompt, candidates, kept, counted, new_tokens)
        requested = jax.vmap(jax.vmap(updater.decode_slots))(states) if spec.reuses else None
    cache = pack(
        spec, tuple(m[0] for m in merged), tuple(m[1] for m in merged), kept,
        is_vision=candidates.is_vision, source=candidates.source, next_position=prompt.next_position,
        requested=requested,
        digits=None if slots.storage is None else slots.storage.chosen_digits(selection.extra),
    )  # fmt: skip
    cache = dataclasses.replace(
        cache, position_limit=prompt.position_limit, kernels=prompt.kernels, rings=rings, states=prompt.states,
        history=lengthened(prompt.history, align(new_tokens, cache.parts)),
    )  # fmt: skip
    if states is not None:
        capacity = new_tokens if spec.reuses else spec.tail(cache.parts)  # a tail may be rounded up
        at = jax.vmap(lambda start, extent: entries(cache.token, start, extent, spec.longest, cache.parts))
        moved = jax.vmap(jax.vmap(partial(packed, new_tokens=capacity, reuses=spec.reuses)))
        states = moved(states, at(cache.start, cache.extent), cache.extent)
        cache = dataclasses.replace(cache, decode_states=tuple(unstacked(states, len(k))), policy=updater)
    return cache


def _decode_states(
    updater: DecodingStages,
    prompt: Prompt,
    found: Candidates,
    kept: Bool[Array, "L B K T"],
    counted: Int[Array, "L B"],
    new_tokens: int,
) -> tuple[DecodeState, Bool[Array, "L B K T"]]:
    """The decode states of all layers [L, B, ...] before packing, and the tokens that they store.

    They are made at once, so that the stages of `updater` are compiled once and not once per layer.
    """
    tokens = prompt.valid.shape[1]

    def make(source, kept, values, counted, is_vision, valid):  # [t], [K, t], [K, t] by name, [], [T], [T]
        def spread(x: Array) -> Array:  # from the layer's tokens to those of the prompt
            return jnp.zeros((len(x), tokens), x.dtype).at[:, source].set(x, mode="drop")

        state = begin(
            jnp.zeros((len(kept), tokens), bool).at[:, source].max(kept, mode="drop"),
            {name: spread(value) for name, value in values.items()}, is_vision, valid, counted,
            new_tokens=new_tokens,
        )  # fmt: skip
        state = updater.begin(state)
        return state, kept & state.stored.at[:, source].get(mode="fill", fill_value=False)

    each = jax.vmap(jax.vmap(make), (0, 0, 0, 0, None, None))
    return each(found.source, kept, found.observed.values, counted, prompt.is_vision, prompt.valid)


def _own_buffers(cache: PackedCache, prompt: Prompt) -> PackedCache:
    """Copies arrays that the cache contains twice or shares with the prompt, so that the cache can be donated."""
    seen = {id(x) for x in jax.tree.leaves(prompt)}

    def unshared(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unshared, cache)
