"""Prefill: runs the model over the prompt, selects entries with the policy, and packs them into one cache.

`prefill` observes each layer as soon as it has run, so that its queries can be freed. `read_prompt` and `fill_cache`
are the two halves of it, for compressing the same prompt in several ways.

Axes: B batch · T prompt · t tokens of one layer · L layers · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.decode_state import DecodeState, begin, packed
from vlkv.cache.packing import pack, without_segments
from vlkv.cache.pool import PackedCache, checked_new_tokens, entries
from vlkv.cache.rings import resize as resize_rings
from vlkv.compression.checking import require_layers, require_policy
from vlkv.compression.policy import DecodingStages, Policy
from vlkv.compression.selection import Observed, allocate_and_take, observe, require_fit, shortlist
from vlkv.compression.sizes import Budget, budget_of, cache_spec, cap_bound
from vlkv.decoder.memory_maps import make_room
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.decode import check_rotation
from vlkv.generation.layer_prompt import LayerPrompt, observation
from vlkv.generation.prompt import Prompt, read_layers
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.keys import single_key
from vlkv.masks import tokens_of
from vlkv.sharding.ops import by_row, slot_parts


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
        sampling: its `max_new_tokens` is the capacity for new tokens; None: `Greedy()`.
        new_tokens: the capacity for new tokens, instead of `sampling`.
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
    return read_and_fill(params, inputs, policy, new_tokens, key=key, kernels=kernels)


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
        new_tokens=checked_new_tokens(new_tokens), windows=params.config.decoder.sliding,
    )  # fmt: skip
    return spec.allocated(slot_parts(spec.columns(params.config.decoder.kv_heads)))


def read_and_fill(
    params: Model,
    inputs: Inputs,
    policy: Policy,
    new_tokens: int,
    *,
    key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """`prefill` for callers that have checked the arguments."""
    layers = params.decoder.full_layers
    budget = _budget(policy, inputs, layers=layers)
    look = _observer(policy, inputs, budget, layers=layers, key=key, kernels=kernels)
    prompt = read_layers(params, inputs, policy, look, new_tokens=new_tokens, key=key, kernels=kernels)
    cache = _fill(prompt.layers, prompt, policy, budget, new_tokens)
    return _own_buffers(cache, prompt), prompt.logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of one layer and row, heads before tokens. Without a cap these are all tokens, with a mask."""

    k: Float[Array, "*B K t H"]
    v: Float[Array, "*B K t H"]
    is_vision: Bool[Array, "*B t"]
    is_candidate: Bool[Array, "*B t"]  # may be kept
    source: Int[Array, "*B t"]  # index of the token in the prompt
    in_scope_count: Int[Array, "*B"]  # number of tokens in scope, before a cap
    observed: Observed


def _look(
    policy: Policy,
    prompt: LayerPrompt,
    key: Key[Array, ""] | None,
    *,
    layer: int,
    layers: int,
    bounds: Inputs | Prompt,
    budget: Budget,
    kernels: Kernels | None,
) -> Candidates:
    """Observes one layer of one row. With a cap, the result has only the layer's shortlist."""
    more = max(0, len(prompt.valid) - bounds.valid.shape[1])  # observers from the answer
    obs = observation(
        policy, prompt, key, layer=layer, layers=layers, max_instruction=bounds.max_instruction, budget=budget,
        kernels=kernels, max_vision=bounds.max_vision, max_text=bounds.max_text + more,
    )  # fmt: skip
    observed, count = observe(policy, obs), jnp.sum(obs.in_scope)
    if policy.cap is None:
        return Candidates(obs.k, obs.v, prompt.is_vision, prompt.is_candidate, prompt.source, count, observed)
    is_candidate = (prompt.is_candidate & ~obs.in_scope) | shortlist(policy, observed, obs, layers=layers)
    most = cap_bound(policy, layers=layers, vision=bounds.max_vision, text=bounds.max_text)
    most = min(most, len(prompt.valid))
    order = tokens_of(is_candidate, most)
    is_candidate, order = order >= 0, jnp.maximum(order, 0)
    values = {name: value[:, order] for name, value in observed.values.items()}
    observed = observed._replace(scores=observed.scores[:, order], protected=observed.protected[order], values=values)
    k, v = (x.at[:, order].get(mode="promise_in_bounds") for x in (obs.k, obs.v))
    return Candidates(k, v, prompt.is_vision[order], is_candidate, prompt.source[order], count, observed)


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
    if policy.reducer != prompt.reducer:
        raise InputError(f"{type(policy).__name__} and the prompt do not fit: give the same policy to read_prompt")
    if isinstance(prompt.valid, jax.core.Tracer):  # as in `Decoder.walk`
        make_room()
    return fill(prompt, policy, budget, new_tokens, key)


def fill(
    prompt: Prompt, policy: Policy, budget: Budget | None, new_tokens: int, key: Key[Array, ""] | None
) -> PackedCache:
    """`fill_cache_with` for callers that have checked the arguments."""
    budget = _budget(policy, prompt, layers=len(prompt.layers)) if budget is None else budget
    look = _observer(policy, prompt, budget, layers=len(prompt.layers), key=key, kernels=prompt.kernels)
    found = tuple(look(i, layer) for i, layer in enumerate(prompt.layers))
    cache = _fill(found, prompt, policy, budget, new_tokens)
    return _own_buffers(cache, prompt)


def _budget(policy: Policy, bounds: Inputs | Prompt, *, layers: int) -> Budget:
    """The budget of a policy for prompts within these bounds."""
    return budget_of(policy, layers=layers, most=bounds.valid.shape[1], text=bounds.max_text)


def _observer(
    policy: Policy,
    bounds: Inputs | Prompt,
    budget: Budget,
    *,
    layers: int,
    key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> Callable[[int, LayerPrompt], Candidates]:
    """A function from a layer's number and its LayerPrompt, for all rows, to its candidates."""
    batch = bounds.valid.shape[0]
    keys = None if key is None else jax.random.split(key, batch)

    def look(i: int, prompt: LayerPrompt) -> Candidates:
        one = partial(_look, policy, layer=i, layers=layers, bounds=bounds, budget=budget, kernels=kernels)
        return by_row(one, batch)(prompt, keys)

    return look


def _fill(
    found: tuple[Candidates, ...], prompt: Prompt, policy: Policy, budget: Budget, new_tokens: int
) -> PackedCache:
    """Makes a cache from the candidates of all layers with full attention, and the prompt's rings and states."""
    rings = None if prompt.rings is None else resize_rings(prompt.rings, new_tokens)
    if not found:
        assert rings is not None
        cache = without_segments(rings.layers[0], prompt.next_position)
        return dataclasses.replace(cache, rings=rings, position_limit=prompt.position_limit, kernels=prompt.kernels,
                                   states=prompt.states)  # fmt: skip
    longest = max(layer.is_candidate.shape[1] for layer in found)
    is_vision, is_candidate, source = (
        jnp.stack([_lengthen(getattr(layer, name), longest) for layer in found])
        for name in ("is_vision", "is_candidate", "source")
    )  # [L, B, T]
    counts = jnp.stack([layer.in_scope_count for layer in found])
    prompt_count = jnp.sum(prompt.valid & prompt.is_vision if policy.scope == "vision" else prompt.valid, axis=1)
    observed = tuple(layer.observed for layer in found)
    choose = jax.vmap(partial(allocate_and_take, policy, budget=budget), in_axes=(0, 1, 1, 1, 0), out_axes=1)
    selection = choose(observed, is_vision, is_candidate, counts, prompt_count)  # [L, B, ...]
    merged = []
    for i, layer in enumerate(found):
        kept, scores = (x[i, ..., : layer.k.shape[2]] for x in (selection.kept, selection.scores))
        merged.append(jax.vmap(policy.merge)(layer.k, layer.v, kept, scores))
    spec = cache_spec(
        policy, layers=len(found), vision=prompt.max_vision, text=prompt.max_text, images=prompt.max_images,
        new_tokens=new_tokens,
    )  # fmt: skip
    kept, requested, states = selection.kept, None, None
    if (updater := policy.updater) is not None:
        states, kept = _decode_states(updater, prompt, found, kept, new_tokens)
        requested = jax.vmap(jax.vmap(updater.decode_slots))(states) if spec.reuses else None
    cache = pack(
        spec, tuple(m[0] for m in merged), tuple(m[1] for m in merged), kept,
        is_vision=is_vision, source=source, next_position=prompt.next_position, requested=requested,
        digits=None if policy.storage is None else policy.storage.chosen_digits(selection.extra),
    )  # fmt: skip
    cache = dataclasses.replace(
        cache, position_limit=prompt.position_limit, kernels=prompt.kernels, rings=rings, states=prompt.states
    )
    if states is not None:
        capacity = new_tokens if spec.reuses else spec.tail(cache.parts)  # a tail may be rounded up
        at = jax.vmap(lambda start, extent: entries(cache.token, start, extent, spec.longest, cache.parts))
        moved = jax.vmap(jax.vmap(partial(packed, new_tokens=capacity, reuses=spec.reuses)))
        states = moved(states, at(cache.start, cache.extent), cache.extent)
        each = tuple(jax.tree.map(operator.itemgetter(i), states) for i in range(len(found)))
        cache = dataclasses.replace(cache, decode_states=each, policy=policy)
    return cache


def _decode_states(
    updater: DecodingStages,
    prompt: Prompt,
    found: tuple[Candidates, ...],
    kept: Bool[Array, "L B K T"],
    new_tokens: int,
) -> tuple[DecodeState, Bool[Array, "L B K T"]]:
    """The decode states of all layers [L, B, ...] before packing, and the tokens that they store.

    They are made at once, so that the stages of `updater` are compiled once and not once per layer.
    """
    tokens, longest = prompt.valid.shape[1], kept.shape[-1]
    source = jnp.stack([_lengthen(layer.source, longest, tokens) for layer in found])  # `tokens`: none
    values = jax.tree.map(lambda *x: jnp.stack([_lengthen(y, longest) for y in x]), *[f.observed.values for f in found])

    def make(source, kept, values, is_vision, valid):  # [t], [K, t], [K, t] by name, [T], [T] of one layer and row
        def spread(x: Array) -> Array:  # from the layer's tokens to those of the prompt
            return jnp.zeros((len(x), tokens), x.dtype).at[:, source].set(x, mode="drop")

        state = begin(
            jnp.zeros((len(kept), tokens), bool).at[:, source].max(kept, mode="drop"),
            {name: spread(value) for name, value in values.items()}, is_vision, valid, new_tokens=new_tokens,
        )  # fmt: skip
        state = updater.begin(state)
        return state, kept & state.stored.at[:, source].get(mode="fill", fill_value=False)

    return jax.vmap(jax.vmap(make), (0, 0, 0, None, None))(source, kept, values, prompt.is_vision, prompt.valid)


def _own_buffers(cache: PackedCache, prompt: Prompt) -> PackedCache:
    """Copies arrays that the cache contains twice or shares with the prompt, so that the cache can be donated."""
    seen = {id(x) for x in jax.tree.leaves(prompt)}

    def unshared(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(unshared, cache)


def _lengthen(x: Array, length: int, fill: int = 0) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])], constant_values=fill)
