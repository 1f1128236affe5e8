"""Numbers of entries that follow from a policy's `totals`: budgets, and the limits of a cap.

All numbers are per key head. Tables are made on the host, because float32 would round the product of a count and a
fraction. Axes: L layers.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.cache.packing import CacheSpec
from vlkv.compression.policy import Policy
from vlkv.errors import InputError
from vlkv.inputs import Inputs

P = TypeVar("P")


def nominal_totals(policy: Policy, *, layers: int, most: int) -> Int[Array | np.ndarray, " counts"]:
    """Number of entries that `keep` or `budget` means for all layers together, for 0..most tokens in scope of each."""
    return Policy.totals(policy, layers * np.arange(most + 1), layers=layers, text=most)


def total(
    policy: Policy, counts: Int[Array, " L"], seen: Int[Array, ""], *, layers: int, most: int, text: int
) -> Int[Array, ""]:
    """Number of entries that all layers together may keep of one prompt.

    Args:
        policy: any policy.
        counts: number of tokens in scope of each layer.
        seen: number of tokens in scope of the prompt, before it was reduced.
        layers: L.
        most: bound on `counts` and `seen`.
        text: bound on the text tokens.
    """
    if policy.reducer is None or policy.counts_dropped:
        return jnp.asarray(policy.totals(layers * np.arange(most + 1), layers=layers, text=text))[seen]
    return jnp.asarray(policy.totals(np.arange(layers * most + 1), layers=layers, text=text))[jnp.sum(counts)]


def cap_counts(policy: Policy, *, layers: int, most: int) -> Int[np.ndarray, " counts"]:
    """Greatest number of entries in scope of one layer with `cap`, for 0..most tokens in scope."""
    assert policy.cap is not None
    mean = nominal_totals(policy, layers=layers, most=most) / layers
    return np.minimum(np.arange(most + 1), np.ceil(policy.cap * mean)).astype(np.int32)


def most_candidates(policy: Policy, *, layers: int, vision: int, text: int) -> int:
    """Bound on the tokens of one layer under the `cap`, for prompts of at most these tokens; out of scope included."""
    if policy.scope == "all":
        return int(cap_counts(policy, layers=layers, most=vision + text)[-1])
    return int(cap_counts(policy, layers=layers, most=vision)[-1]) + text


class Budget(NamedTuple):
    """The budget of a policy as arrays, so that policies that differ only in `keep` share one compiled program."""

    keep: Float[Array | np.ndarray, ""]
    totals: Int[Array | np.ndarray, " counts"]  # result of `nominal_totals`


def with_budget(given: P, budget: Budget) -> P:
    """A copy of a policy and its parts with this budget. It is only for tracing, because its options are not static."""
    copied = copy.copy(given)
    object.__setattr__(copied, "keep", budget.keep)
    object.__setattr__(copied, "_totals", budget.totals)
    for field in dataclasses.fields(given):  # type: ignore[arg-type]
        part = getattr(given, field.name)
        if isinstance(part, Policy):
            object.__setattr__(copied, field.name, with_budget(part, budget))
    return copied


def pool_slots(
    policy: Policy, inputs: Inputs | None = None, *, layers: int, new_tokens: int = 64, vision: int = 0, text: int = 0,
    images: int = 1, parts: int = 1,
) -> int:  # fmt: skip
    """Slots that a cache allocates per row and key head, in the pool and the tails of all layers.

    Args:
        policy: determines how many entries may be kept.
        inputs: prompts, whose bounds are used; None: the bounds are the next three arguments.
        layers: L, `len(params.decoder.layers)`.
        new_tokens: capacity for generated tokens.
        vision: bound on the vision tokens of a row (`Inputs.max_vision`).
        text: bound on its text tokens (`Inputs.max_text`).
        images: bound on its images (`Inputs.max_images`).
        parts: M: 1, or the size of the mesh's `model` axis if it does not divide the columns of the pool: the key
            heads, or 1 with `Policy.per_head`.

    Raises:
        InputError: `inputs` of another type.
    """
    if inputs is not None and not isinstance(inputs, Inputs):
        raise InputError("inputs are not vlkv.Inputs: convert a Hugging Face batch by vlkv.Inputs.from_hf")
    if inputs is not None:
        vision, text, images = inputs.max_vision, inputs.max_text, inputs.max_images
    spec = cache_spec(policy, layers=layers, vision=vision, text=text, images=images, new_tokens=new_tokens)
    return spec.pool(parts) + layers * spec.tail(parts)


def cache_spec(policy: Policy, *, layers: int, vision: int, text: int, images: int, new_tokens: int) -> CacheSpec:
    """What the policy needs of a cache; arguments as in `pool_slots`."""
    slots = total_bound(policy, layers=layers, vision=vision, text=text, images=images)
    # The default `allocate` gives equal budgets to layers with the same number of tokens.
    equal = type(policy.allocator).allocate is Policy.allocate and policy.reducer is None
    limit = vision + text
    longest = -(-slots // layers) if equal else limit
    # An evicted entry frees its slot, unless the pool is quantised, because slots share scales.
    reuses = False
    if policy.storage is None and (updater := policy.updater) is not None and updater.evicts:
        reuses = True
        slots, longest = updater.decode_bounds(
            slots, longest, layers=layers, vision=vision, text=text, new_tokens=new_tokens
        )
        limit = longest
    return CacheSpec(
        layers=layers, slots=slots, longest=longest, limit=limit, new_tokens=new_tokens, reuses=reuses,
        per_head=policy.per_head, storage=policy.storage, softmax_n=policy.softmax_n,
    )  # fmt: skip


def total_bound(policy: Policy, *, layers: int, vision: int, text: int, images: int = 1) -> int:
    """Bound on the entries of all layers together, for prompts of at most these tokens; out of scope included."""
    text_in_scope, text_kept = (layers * text, 0) if policy.scope == "all" else (0, layers * text)
    if policy.reducer is None or policy.counts_dropped:
        sums = np.arange(0, layers * vision + text_in_scope + 1, layers)
    else:
        sums = np.arange(sum(vision_bounds(policy, layers=layers, vision=vision, images=images)) + text_in_scope + 1)
    return int(np.max(policy.totals(sums, layers=layers, text=text))) + text_kept


def vision_bounds(policy: Policy, *, layers: int, vision: int, images: int) -> tuple[int, ...]:
    """Bound on the vision tokens of each layer, before tokens are selected."""
    reducer, left = policy.reducer, [vision]
    if reducer is None:
        return (vision,) * layers
    after = reducer.reductions(layers)
    for stage in range(len(after)):
        left.append(min(left[-1], reducer.remaining(stage=stage, vision=left[-1], images=images)))
    if reducer.drops_early_layers:
        return (left[-1],) * layers
    return tuple(left[sum(i >= a for a in after)] for i in range(layers))
