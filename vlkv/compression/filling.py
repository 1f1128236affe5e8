"""The second half of prefill: selects entries of a prompt with a policy, and packs them into one cache.

Axes: B batch · T prompt · t tokens of one layer · L layers · K key heads · H head dim · A position axes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from pallas_kernels.cpu import unstacked
from vlkv.cache.decode_state import DecodeState, begin, packed
from vlkv.cache.history import lengthened
from vlkv.cache.packing import CacheSpec, align, pack, without_segments
from vlkv.cache.pool import PackedCache, entries
from vlkv.cache.rings import Rings, resize
from vlkv.cache.states import State
from vlkv.compression.candidates import Candidates, Search
from vlkv.compression.policy import DecodingStages, Policy, ReducingStages
from vlkv.compression.selection import allocate_and_take
from vlkv.compression.sizes import Budget, budget_of, cache_spec, counts_prompt
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.inputs import Bounds, Inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt after all layers, from which `fill_cache` makes a cache."""

    # Of the layers with full attention: `Layer`, or what `read_layers` got of its `each`.
    layers: tuple[Any, ...]
    is_vision: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]
    next_position: Int[Array, "B A"]
    logits: Float[Array, "B vocab"]  # of the first new token
    bounds: Bounds = dataclasses.field(metadata={"static": True})
    reducer: ReducingStages | None = dataclasses.field(metadata={"static": True})  # the policy that reduced the prompt
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    position_limit: Int[Array, " B"] | None = None  # as in PackedCache
    rings: Rings | None = None  # likewise, without capacity for new tokens
    states: tuple[State, ...] = ()  # likewise
    history: Int[Array, "B T"] | None = None  # likewise, without capacity for new tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a policy and the bounds of a prompt say of its cache before the model runs."""

    search: Search
    spec: CacheSpec


def plan(
    policy: Policy,
    prompt: Inputs | Prompt,
    key: Key[Array, ""] | None,
    *,
    layers: int,
    new_tokens: int,
    budget: Budget | None = None,
) -> Plan:
    """The plan for a cache with capacity for `new_tokens`; `budget` is that of `fill_cache_with`."""
    bounds = prompt.bounds
    budget = (
        budget_of(policy, layers=layers, most=prompt.valid.shape[1], text=bounds.text) if budget is None else budget
    )
    return Plan(
        search=Search(policy=policy, layers=layers, budget=budget, bounds=bounds, key=key),
        spec=cache_spec(policy, layers=layers, new_tokens=new_tokens, **bounds.sizes),
    )


def fill(plan: Plan, prompt: Prompt) -> PackedCache:
    """The cache of a prompt with `Layer`s."""
    length = prompt.valid.shape[1]
    return fill_with(plan, prompt, plan.search.in_all(prompt.layers, length))


def fill_with(plan: Plan, prompt: Prompt, candidates: Candidates | None) -> PackedCache:
    """The cache of the candidates of all layers with full attention, and of the prompt's rings and states."""
    new_tokens = plan.spec.new_tokens
    rings = None if prompt.rings is None else resize(prompt.rings, new_tokens)
    if candidates is None:
        assert rings is not None
        cache = without_segments(rings.layers[0], prompt.next_position)
    else:
        cache = _packed(plan, prompt, candidates)
        new_tokens = align(new_tokens, cache.parts)
    cache = dataclasses.replace(
        cache, position_limit=prompt.position_limit, kernels=prompt.kernels, rings=rings, states=prompt.states,
        history=lengthened(prompt.history, new_tokens),
    )  # fmt: skip
    return _own_buffers(cache, prompt)


def _packed(plan: Plan, prompt: Prompt, candidates: Candidates) -> PackedCache:
    policy, spec, slots = plan.search.policy, plan.spec, slots_of(plan.search.policy)
    prompt_count = jnp.sum(prompt.valid & prompt.is_vision if policy.scope == "vision" else prompt.valid, axis=1)
    choose = partial(allocate_and_take, policy, budget=plan.search.budget)
    selection = jax.vmap(choose, in_axes=(1, 1, 1, 1, 0), out_axes=1)(
        candidates.observed, candidates.is_vision, candidates.is_candidate, candidates.in_scope_count, prompt_count
    )
    merged = []
    for i, layer in enumerate(zip(candidates.k, candidates.v, strict=True)):
        kept, scores = (x[i, ..., : layer[0].shape[2]] for x in (selection.kept, selection.scores))  # [B, K, t]
        merged.append(layer if slots.merge is None else jax.vmap(stage_of(slots.merge, "merge"))(*layer, kept, scores))
    kept, requested, states = selection.kept, None, None
    if (updater := slots.step) is not None:
        counted = jnp.broadcast_to(prompt_count, candidates.in_scope_count.shape)
        counted = counted if counts_prompt(policy) else candidates.in_scope_count
        states, kept = _decode_states(updater, prompt, candidates, kept, counted, spec.new_tokens)
        requested = jax.vmap(jax.vmap(updater.decode_slots))(states) if spec.reuses else None
    cache = pack(
        spec, tuple(k for k, _ in merged), tuple(v for _, v in merged), kept,
        is_vision=candidates.is_vision, source=candidates.source, next_position=prompt.next_position,
        requested=requested,
        digits=None if slots.storage is None else slots.storage.chosen_digits(selection.extra),
    )  # fmt: skip
    if states is None:
        return cache
    capacity = spec.new_tokens if spec.reuses else spec.tail(cache.parts)  # a tail may be rounded up
    at = jax.vmap(lambda start, extent: entries(cache.token, start, extent, spec.longest, cache.parts))
    arranged = jax.vmap(jax.vmap(partial(packed, new_tokens=capacity, reuses=spec.reuses)))
    states = arranged(states, at(cache.start, cache.extent), cache.extent)
    return dataclasses.replace(cache, decode_states=tuple(unstacked(states, len(merged))), policy=updater)


def _decode_states(
    updater: DecodingStages,
    prompt: Prompt,
    candidates: Candidates,
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
    return each(candidates.source, kept, candidates.observed.values, counted, prompt.is_vision, prompt.valid)


def _own_buffers(cache: PackedCache, prompt: Prompt) -> PackedCache:
    """Copies arrays that the cache contains twice or shares with the prompt, so that the cache can be donated."""
    seen = {id(x) for x in jax.tree.leaves(prompt)}

    def unshared(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unshared, cache)
