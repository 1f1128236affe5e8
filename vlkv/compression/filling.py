"""The second half of prefill: selects entries of a prompt with a policy, and packs them into one cache.

Axes: B batch · T prompt · t tokens of one layer · L layers · K key heads · H head dim · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from vlkv.cache import decode_state
from vlkv.cache.decode_state import DecodeState, packed
from vlkv.cache.packing import align, pack
from vlkv.cache.pool import PackedCache, entries, own_buffers
from vlkv.cache.resizing import lengthened
from vlkv.cache.rings import Ring, Rings, resize
from vlkv.cache.states import State
from vlkv.compression.candidates import Candidates, Plan, Search
from vlkv.compression.observe import StackedLayers, fields_of
from vlkv.compression.policy import DecodingStages, ReducingStages
from vlkv.compression.reselecting import begin
from vlkv.compression.selection import Selection, allocate_and_take
from vlkv.compression.sizes import Budget, counts_prompt
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.config import RopeConfig
from vlkv.inputs import Bounds

Kept = Bool[Array, "L B K T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt after all layers, from which `fill_cache` makes a cache."""

    # One for each layer with full attention: a `Layer`, or what `each` of `read_layers` has returned for it.
    layers: tuple[Any, ...] | StackedLayers
    is_vision: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]
    next_position: Int[Array, "B A"]
    logits: Float[Array, "B vocab"]  # of the first new token
    bounds: Bounds = dataclasses.field(metadata={"static": True})
    reducer: ReducingStages | None = dataclasses.field(metadata={"static": True})  # the policy that reduced the prompt
    kernels: Kernels = dataclasses.field(default=Kernels(), metadata={"static": True})  # implementations of the ops
    heads: int = dataclasses.field(default=0, metadata={"static": True})  # of queries; needed to select again
    rope: RopeConfig | None = dataclasses.field(default=None, metadata={"static": True})  # the same
    position_limit: Int[Array, " B"] | None = None  # as in PackedCache
    rings: Rings | None = None  # as in PackedCache, but without capacity for new tokens
    states: tuple[State, ...] = ()  # as in PackedCache
    history: Int[Array, "B T"] | None = None  # as in PackedCache, but without capacity for new tokens


def fill(plan: Plan, prompt: Prompt, key: Key[Array, ""] | None, budget: Budget | None = None) -> PackedCache:
    """Selects entries of a prompt that has `Layer`s, and makes the cache. `budget` as in `fill_cache_with`."""
    search = Search(plan, plan.budget if budget is None else budget, key)
    return fill_with(search, prompt, search.in_all(prompt.layers))


def fill_with(search: Search, prompt: Prompt, candidates: Candidates | None) -> PackedCache:
    """Makes the cache of a prompt from the candidates of all layers with full attention; None: no layer has it."""
    new_tokens = search.plan.new_tokens
    if candidates is None:
        assert prompt.rings is not None
        cache = _without_segments(prompt.rings.layers[0], prompt.next_position)
    else:
        cache = _packed(search, prompt, candidates)
    of_prompt = fields_of(prompt, "position_limit", "kernels", "states")
    # A tail may have more slots than new tokens; a cache that is selected again takes any number of them.
    capacity = new_tokens if cache.reselection is None else cache.new_tokens
    rings = None if prompt.rings is None else resize(prompt.rings, capacity)
    # If entries are selected again, nothing but the ids grows. The last place shows that there were too many.
    history = lengthened(prompt.history, align(new_tokens, cache.parts) + (cache.reselection is not None))
    cache = dataclasses.replace(cache, **of_prompt, rings=rings, history=history)
    return own_buffers(cache, prompt)


def _packed(search: Search, prompt: Prompt, candidates: Candidates) -> PackedCache:
    """Takes the best candidates of every layer, merges, makes the decode states, and packs. Adds no rings or states."""
    policy, spec, slots = search.plan.policy, search.plan.spec, slots_of(search.plan.policy)
    prompt_count = jnp.sum(prompt.valid & prompt.is_vision if policy.scope == "vision" else prompt.valid, axis=1)
    choose = partial(allocate_and_take, policy, budget=search.budget)
    # Over the rows, which are the second axis of what all layers have together.
    selection = jax.vmap(choose, in_axes=(1, 1, 1, 1, 0), out_axes=1)(
        candidates.observed, candidates.is_vision, candidates.is_candidate, candidates.in_scope_count, prompt_count
    )
    keys, values = candidates.k, candidates.v
    if slots.merge is not None:
        keys, values = _merged(jax.vmap(stage_of(slots.merge, "merge")), keys, values, selection)
    kept, requested, states, again = selection.kept, None, None, None
    if (updater := slots.step) is not None:
        counted = jnp.broadcast_to(prompt_count, candidates.in_scope_count.shape)
        counted = counted if counts_prompt(policy) else candidates.in_scope_count
        states, kept = _decode_states(updater, prompt, candidates, kept, counted, spec.new_tokens)
        requested = jax.vmap(jax.vmap(updater.decode_slots))(states) if spec.reuses else None
    of_candidates = fields_of(candidates, "is_vision", "source")
    if slots.every:  # entries stay in their order, because they are selected again
        of_candidates["is_vision"] = jnp.zeros_like(candidates.is_vision)
        again = begin(search, candidates, kept, prompt_count, heads=prompt.heads, rope=prompt.rope)
    extra = selection.extra if len(slots.deciding) == 1 else selection.extra[slots.named(slots.allocate)]
    digits = None if slots.storage is None else slots.storage.chosen_digits(extra)
    cache = pack(
        spec,
        keys,
        values,
        kept,
        **of_candidates,
        next_position=prompt.next_position,
        requested=requested,
        digits=digits,
    )
    if states is None:
        return dataclasses.replace(cache, reselection=again)
    capacity = spec.new_tokens if spec.reuses else spec.tail(cache.parts)  # a tail may be rounded up
    # Until now, decode states have an entry for each token of the prompt. Packing has given the tokens slots.
    tokens_of_slots = jax.vmap(lambda start, extent: entries(cache.token, start, extent, spec.longest, cache.parts))
    arranged = jax.vmap(jax.vmap(partial(packed, new_tokens=capacity, reuses=spec.reuses)))
    states = arranged(states, tokens_of_slots(cache.start, cache.extent), cache.extent)
    return dataclasses.replace(cache, decode_states=states, policy=updater)


def _merged(merge: Callable[..., tuple[Array, Array]], keys: Any, values: Any, selection: Selection) -> tuple[Any, Any]:
    """Keys and values of all layers after the policy's `merge`."""
    if not isinstance(keys, tuple):  # a loop is compiled once for all layers
        merged: tuple[Array, Array] = jax.lax.map(
            lambda layer: merge(*layer), (keys, values, selection.kept, selection.scores)
        )
        return merged
    of_layers = []
    for i, layer in enumerate(zip(keys, values, strict=True)):
        # Shorter layers have been padded to the longest one.
        kept, scores = (x[i, ..., : layer[0].shape[2]] for x in (selection.kept, selection.scores))  # [B, K, t]
        of_layers.append(merge(*layer, kept, scores))
    keys, values = zip(*of_layers, strict=True)
    return keys, values


def _decode_states(
    updater: DecodingStages, prompt: Prompt, candidates: Candidates, kept: Kept, counted: Array, new_tokens: int
) -> tuple[DecodeState, Kept]:
    """Makes the decode states of all layers [L, B, ...] before packing; returns them and the tokens that they store.

    `updater` may evict at once, so these may be fewer tokens than `kept`. One `vmap` makes all states, so that the
    stages of `updater` are compiled once and not once per layer.
    """
    tokens = prompt.valid.shape[1]

    def make(source, kept, values, counted, is_vision, valid):  # [t], [K, t], [K, t] by name, [], [T], [T]
        def spread(x: Array) -> Array:  # from the layer's tokens to those of the prompt
            return jnp.zeros((len(x), tokens), x.dtype).at[:, source].set(x, mode="drop")

        stored = jnp.zeros((len(kept), tokens), bool).at[:, source].max(kept, mode="drop")
        values = {name: spread(value) for name, value in values.items()}
        state = decode_state.begin(stored, values, is_vision, valid, counted, new_tokens=new_tokens)
        state = updater.begin(state)
        return state, kept & state.stored.at[:, source].get(mode="fill", fill_value=False)

    make_all = jax.vmap(jax.vmap(make), (0, 0, 0, 0, None, None))
    return make_all(candidates.source, kept, candidates.observed.values, counted, prompt.is_vision, prompt.valid)


def _without_segments(ring: Ring, next_position: Int[Array, "B A"]) -> PackedCache:
    """An empty cache without segments, for a model in which all layers have windows. The caller adds the rings."""
    batch, heads, _, head_dim = ring.k.shape

    def pool() -> Array:  # called twice, because shared buffers cannot be donated
        return jnp.zeros((batch, heads, 0, head_dim), ring.k.dtype)

    def table() -> Array:
        return jnp.zeros((0, batch, heads), jnp.int32)

    return PackedCache(
        k=pool(), v=pool(), token=jnp.zeros((batch, heads, 0), jnp.int32), start=table(), extent=table(), tail_k=None,
        tail_v=None, used=jnp.zeros(batch, jnp.int32), next_position=next_position,
    )  # fmt: skip
