"""Numbers of entries and slots that follow from a policy.

    count    tokens in scope of one layer of one prompt
    total    entries in scope that all layers together keep, per key head
    table    a number for every count 0..most, made on the host: float32 would round the product of a count and a
             fraction, and counts are traced
    bound    a static limit for prompts of at most given numbers of tokens, from which the size of the cache follows

Axes: L layers with full attention.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.cache.marks import UNLIMITED
from vlkv.cache.packing import CacheSpec
from vlkv.cache.rings import ring_slots
from vlkv.compression import budgets
from vlkv.compression.policy import Policy, ReducingStages
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import Totals, stage_of


class Budget(NamedTuple):
    """`keep` or `budget` as tables, which a program gets as arguments. So one program can serve several `keep`.

    `nominal` and `total` differ for methods with a `Stages.total` of their own, such as published code that keeps more.
    """

    mean: Float[Array | np.ndarray, " counts"]  # by count: `keep` times the count, or `budget`
    nominal: Int[Array | np.ndarray, " counts"]  # by count: the total by `budgets.total`, for `obs.mean_budget`
    # `Stages.total`. Indexed by count; if the prompt is reduced, so that layers have unequal counts, by their sum.
    total: Int[Array | np.ndarray, " sums"]


def budget_of(policy: Policy, *, layers: int, most: int, text: int) -> Budget:
    """The budget of a policy, for 0..most tokens in scope of each layer, and at most `text` text tokens."""
    counts = np.arange(most + 1)
    mean = np.full(most + 1, policy.budget) if policy.keep is None else policy.keep * counts
    nominal = budgets.total(policy.keep, policy.budget, layers * counts, layers=layers)
    sums = layers * counts if counts_prompt(policy) else np.arange(layers * most + 1)
    return Budget(mean.astype(np.float32), nominal, total_of(policy, sums, layers=layers, text=text))


def total_of(policy: Policy, sums: Totals, *, layers: int, text: int) -> Totals:
    """`Stages.total` of the method that allocates."""
    return stage_of(slots_of(policy).allocate, "total")(sums, layers=layers, text=text)


def counts_prompt(policy: Policy) -> bool:
    """Whether `keep` is a fraction of the tokens of the prompt, and not of those that are left after a reduction."""
    slots = slots_of(policy)
    return slots.reduce is None or slots.counts_dropped


def most_recent(policy: Policy, budget: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The number of most recent tokens that are kept besides `Policy.protect` with these budgets."""
    slots = slots_of(policy)
    none = policy.scope == "vision" or slots.divides_bits
    recent = jnp.zeros_like(budget) if none else slots.recent_of(budget)
    return jnp.minimum(recent, budget)


def cap_table(policy: Policy, *, layers: int, most: int) -> Int[np.ndarray, " counts"]:
    """By count: the greatest number of entries in scope that one layer may keep with `cap`."""
    assert policy.cap is not None
    counts = np.arange(most + 1)
    mean = budgets.total(policy.keep, policy.budget, layers * counts, layers=layers) / layers
    return np.minimum(counts, np.ceil(policy.cap * mean)).astype(np.int32)


def cap_bound(policy: Policy, *, layers: int, vision: int, text: int) -> int:
    """Bound on the entries of one layer with `cap`; entries out of scope are included."""
    if policy.scope == "all":
        return int(cap_table(policy, layers=layers, most=vision + text)[-1])
    return int(cap_table(policy, layers=layers, most=vision)[-1]) + text


def total_bound(policy: Policy, *, layers: int, vision: int, text: int, images: int = 1, placeless: int = 0) -> int:
    """Bound on the entries of all layers together; entries out of scope are included."""
    if layers == 0:
        return 0
    text_in_scope, text_kept = (layers * text, 0) if policy.scope == "all" else (0, layers * text)
    if counts_prompt(policy):
        sums = np.arange(0, layers * vision + text_in_scope + 1, layers)
    else:
        bounds = vision_bounds(policy, layers=layers, vision=vision, images=images, placeless=placeless)
        sums = np.arange(sum(bounds) + text_in_scope + 1)
    # The maximum over all sums, because a shorter prompt may keep more: published code treats it differently.
    return int(np.max(total_of(policy, sums, layers=layers, text=text))) + text_kept


def vision_bounds(policy: Policy, *, layers: int, vision: int, images: int, placeless: int = 0) -> tuple[int, ...]:
    """Bound on the vision tokens of each layer, before entries are selected."""
    reducer, bounds = slots_of(policy).reduce, [vision]  # bounds after each number of stages
    if reducer is None:
        return (vision,) * layers
    after = reducer.reductions(layers)
    for i in range(len(after)):
        bounds.append(remaining(reducer, stage=i, vision=bounds[-1], images=images, placeless=placeless))
    if stage_of(reducer, "drops_early_layers"):
        return (bounds[-1],) * layers
    return tuple(bounds[sum(i >= a for a in after)] for i in range(layers))


def remaining(reducer: ReducingStages, *, stage: int, vision: int, images: int, placeless: int) -> int:
    """Bound on the vision tokens after a stage.

    Args:
        reducer: the method that reduces the prompt.
        stage: index into its `reductions`.
        vision: bound on the vision tokens before the stage.
        images: bound on the images (`Inputs.max_images`).
        placeless: bound on the vision tokens without a position on the grid (`Inputs.max_placeless`). If the method
            keeps them all (`Stages.keeps_placeless`), they are added to the bound of `ReducingStages.remaining`, which
            reserves one such token for each image.
    """
    kept_placeless = min(placeless, vision) if stage_of(reducer, "keeps_placeless") else 0
    return min(vision, kept_placeless + reducer.remaining(stage=stage, vision=vision - kept_placeless, images=images))


def cache_spec(
    policy: Policy,
    *,
    layers: int,
    vision: int,
    text: int,
    new_tokens: int,
    images: int = 1,
    placeless: int = 0,
    windows: tuple[int, ...] = (),
) -> CacheSpec:
    """What the policy needs of a cache.

    Args:
        policy: determines how many entries may be kept.
        layers: L, the layers with full attention.
        vision: bound on the vision tokens of a row (`Inputs.max_vision`).
        text: bound on its text tokens (`Inputs.max_text`).
        new_tokens: capacity for generated tokens.
        images: bound on its images (`Inputs.max_images`).
        placeless: bound on its vision tokens without a position on the grid (`Inputs.max_placeless`).
        windows: lengths of the windows of the layers that have one.
    """
    owners, updater = slots_of(policy), slots_of(policy).step
    if owners.every:  # a short prompt may grow up to the budget, or a layer beyond it, and a ring up to its window
        text, new_tokens = text + 4 * (policy.budget or 0), UNLIMITED
    slots = total_bound(policy, layers=layers, vision=vision, text=text, images=images, placeless=placeless)
    # With equal budgets, a segment needs only its share of the slots. After a reduction, layers have unequal numbers of
    # tokens, and so unequal budgets.
    equal = policy.facts.budgets == "equal" and owners.reduce is None
    limit = vision + text
    longest = -(-slots // max(layers, 1)) if equal else limit
    bounds: tuple[int, int] | None = None
    # An evicted entry frees its slot, unless the pool is quantised, because slots share scales.
    if owners.storage is None and updater is not None:
        bounds = updater.decode_bounds(slots, longest, layers=layers, vision=vision, text=text, new_tokens=new_tokens)
    if bounds is not None:
        slots, longest = bounds
        limit = longest
    return CacheSpec(
        layers=layers, slots=slots, longest=longest, limit=limit, new_tokens=owners.every or new_tokens,
        reuses=bounds is not None, per_head=policy.facts.budgets == "heads", storage=owners.storage,
        softmax_n=owners.softmax_n,
        rings=tuple(ring_slots(window, vision + text + new_tokens) for window in windows),
        outside=text if policy.scope == "vision" else 0,
    )  # fmt: skip
