"""Prefill: runs the model over the prompt, selects entries with the policy, and packs them into one cache.

`prefill` observes each layer as soon as it has run, so that its queries can be freed. `read_prompt` and `fill_cache`
are the two halves of it, for compressing the same prompt in several ways.

Axes: B batch · T prompt · t tokens of one layer · L layers · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float, Key, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.parts import slot_parts
from vlkv.cache.pool import PackedCache, checked_new_tokens
from vlkv.compression.candidates import Plan, Search, stacked
from vlkv.compression.checking import require_layers, require_policy
from vlkv.compression.filling import Prompt, fill, fill_with
from vlkv.compression.observe import StackedLayers
from vlkv.compression.policy import Policy
from vlkv.compression.sizes import Budget, cache_spec
from vlkv.compression.slots import slots_of
from vlkv.decoder.memory_maps import make_room
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.decode import check_rotation
from vlkv.generation.prompt import read_layers
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs, single_key


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
    plan = Plan.of(policy, inputs, key, layers=params.decoder.full_layers, new_tokens=new_tokens)
    return read_and_fill(params, inputs, plan, sampling=sampling, key=key, kernels=kernels)


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
        policy,
        layers=layers,
        new_tokens=checked_new_tokens(new_tokens),
        windows=params.config.decoder.sliding,
        **inputs.bounds.sizes,
    )
    return spec.allocated(slot_parts(spec.columns(params.config.decoder.kv_heads)))


def read_and_fill(
    params: Model,
    inputs: Inputs,
    plan: Plan,
    *,
    sampling: Greedy | None = None,
    key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """`prefill` by a plan."""
    search, new_tokens = Search(plan, plan.budget, key), plan.new_tokens
    options: dict[str, Any] = {"sampling": sampling, "new_tokens": new_tokens, "key": key, "kernels": kernels}
    prompt = read_layers(params, inputs, plan.policy, search.in_layer, stacked=True, **options)
    layers = prompt.layers
    candidates = layers.record if isinstance(layers, StackedLayers) else stacked(layers, plan.length)
    return fill_with(search, prompt, candidates), prompt.logits


def fill_cache(prompt: Prompt, policy: Policy, *, new_tokens: int, key: PRNGKeyArray | None = None) -> PackedCache:
    """A cache of the prompt entries that the policy keeps, with capacity for `new_tokens`.

    Raises:
        InputError: the policy needs a key, another policy has reduced the prompt, or new_tokens is less than 1, or
            (for long-RoPE, outside jit) so much larger than that of `read_prompt` that rows need other factors.
    """
    return fill_cache_with(prompt, policy, None, new_tokens=new_tokens, key=key)


def fill_cache_with(
    prompt: Prompt, policy: Policy, budget: Budget | None, *, new_tokens: int, key: PRNGKeyArray | None = None
) -> PackedCache:
    """`fill_cache` with the budget as arrays, so that one compiled program can be used for every keep.

    `policy` has the largest keep, for which memory is allocated, and `budget` is `budget_of` the same policy with a
    smaller one, or None. Stages must not use `self.keep` for anything else than bounds on sizes.

    Raises:
        InputError: as `fill_cache`.
    """
    key = single_key(key)
    plan = Plan.of(policy, prompt, key, layers=len(prompt.layers), new_tokens=new_tokens)
    check_rotation(prompt, plan.new_tokens)
    if slots_of(policy).reduce != prompt.reducer:
        raise InputError(f"{type(policy).__name__} and the prompt do not fit: give the same policy to read_prompt")
    if isinstance(prompt.valid, jax.core.Tracer):  # as in `Decoder.walk`
        make_room()
    return fill(plan, prompt, key, budget)
