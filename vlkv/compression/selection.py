"""Runs a policy's stages: observe every layer, allocate budgets once, take the best tokens of each layer.

Unbatched. `generate` runs these functions under vmap, layer by layer during prefill; `select` runs the same functions
on given queries and keys. Axes: L layers · N query heads · K key heads · T tokens · H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, UInt32

from pallas_kernels import Kernels
from vlkv.compression.checking import checked_scores, require_context, require_fit
from vlkv.compression.observe import LayerContext, Observation
from vlkv.compression.policy import Policy
from vlkv.compression.sizes import Budget, budget_of, cap_table, counts_prompt, most_recent
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import Statistics, stage_of
from vlkv.errors import InputError
from vlkv.keys import single_key
from vlkv.masks import binary_search, first, last, top


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """The tokens that a policy keeps."""

    kept: Bool[Array, "*B L K T"]
    budgets: Int[Array, "*B L K"]  # number of kept tokens in scope
    scores: Float[Array, "*B L K T"]  # +inf out of scope (always kept), -inf if never a candidate
    # The method's intermediate arrays, each with a leading axis L; if several methods of a composition score, rank or
    # allocate: by the first slot of each method.
    extra: Statistics


class Observed(NamedTuple):
    """Results of one layer that are kept until budgets are allocated. Size O(K T), without keys or queries."""

    scores: Float[Array, "K T"]
    protected: Bool[Array, " T"]
    statistics: tuple[Statistics, ...]  # of each of `Slots.deciding`
    values: dict[str, Float[Array, "K T"]]  # for the decode state


def make_observation(
    policy: Policy,
    q: Float[Array, "N T H"],
    k: Float[Array, "K T H"],
    v: Float[Array, "K T H"],
    is_vision: Bool[Array, " T"],
    valid: Bool[Array, " T"],
    key: Key[Array, ""] | None,
    *,
    layer: int | Int[Array, ""],
    layers: int,
    max_instruction: int,
    budget: Budget | None = None,
    is_candidate: Bool[Array, " T"] | None = None,
    grid: Int[Array, "T 3"] | None = None,
    until: Int[Array, " T"] | None = None,
    lse: Float[Array, "N T"] | None = None,
    kernels: Kernels | None = None,
    context: LayerContext | None = None,
    received: dict[str, Float[Array, "N T"]] | None = None,
    max_vision: int | None = None,
    max_text: int | None = None,
) -> Observation:
    """The observation of one layer for the policy's stages.

    `budget`: None: that of the policy. `is_candidate`: None: all valid tokens. `max_vision` and `max_text`: bounds on
    the tokens; None: unknown.

    Raises:
        InputError: the policy uses something of the context that is not known.
    """
    require_context(policy, context)
    is_candidate = valid if is_candidate is None else is_candidate
    in_scope = is_candidate & is_vision if policy.scope == "vision" else is_candidate
    count, most = jnp.sum(in_scope), in_scope.shape[0]
    budget = budget_of(policy, layers=layers, most=most, text=most) if budget is None else budget
    return Observation(
        q=q, k=k, v=v, is_vision=is_vision & valid, valid=valid, in_scope=in_scope,
        is_candidate=is_candidate,
        asked=jnp.asarray(budget.mean)[count], mean_budget=jax.lax.div(jnp.asarray(budget.nominal)[count], layers),
        key=None if key is None else jax.random.fold_in(key, layer),
        layer=layer, max_instruction=max_instruction, grid=grid, until=until, lse=lse,
        kernels=Kernels() if kernels is None else kernels, context=context, received=received or {},
        max_vision=max_vision, max_text=max_text, competes=max_vision != 0 or policy.scope == "all",
    )  # fmt: skip


def observe(policy: Policy, obs: Observation) -> Observed:
    """Scores, protected tokens, statistics and decode values of one layer."""
    slots = slots_of(policy)
    scores_of = functools.cache(functools.partial(checked_scores, obs=obs))
    protected = slots.score.protect(obs) & obs.in_scope if policy.scope == "all" else jnp.zeros_like(obs.valid)
    values = {} if slots.step is None else slots.step.decode_values(obs, scores_of(slots.step))
    useful = obs.competes or policy.facts.budgets == "bits"  # which tokens out of scope have too

    def statistics(owner: Policy) -> Statistics:
        if not useful:
            return _zeros_like(stage_of(owner, "statistics"), obs, scores_of(owner))
        arrays: Statistics = stage_of(owner, "statistics")(obs, scores_of(owner))
        if slots.smooth is None or owner != slots.rank:
            return arrays
        by = [name for name in stage_of(owner, "ranked_by") if name != "scores"]
        return arrays | {name: slots.smoothed(arrays[name], obs) for name in by}

    scores = slots.smoothed(scores_of(slots.score), obs)
    return Observed(scores, protected, tuple(map(statistics, slots.deciding)), values)


def _zeros_like(function: Callable[..., Statistics], *args: Any) -> Statistics:
    """Zeros in place of the results of a function, which are not computed."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))


def allocate_and_take(
    policy: Policy,
    observed: Observed,
    is_vision: Bool[Array, "L T"],
    is_candidate: Bool[Array, "L T"],
    counts: Int[Array, " L"],
    prompt_count: Int[Array, ""],
    *,
    budget: Budget,
) -> Selection:
    """Allocates budgets from all layers' statistics, then takes the best tokens of each layer; ties: the earlier token.

    Args:
        policy: any policy.
        observed: of all layers, from `stack`.
        is_vision: of each layer's tokens, padded to the longest layer.
        is_candidate: which tokens are candidates.
        counts: number of tokens in scope of each layer, before a cap.
        prompt_count: number of tokens in scope of the prompt.
        budget: of the policy.
    """
    layers, slots = len(is_vision), slots_of(policy)
    equal = policy.facts.budgets == "equal" and slots.reduce is None  # but for the remainder of rounding
    in_scope = is_candidate & is_vision if policy.scope == "vision" else is_candidate
    out_of_scope = is_candidate & ~in_scope
    scores, protected, statistics, _ = observed
    most = jnp.sum(in_scope, axis=1)
    # After a reduction, `total` may exceed the tokens that are left.
    total = jnp.asarray(budget.total)[prompt_count if counts_prompt(policy) else jnp.sum(counts)]
    total = jnp.minimum(total, jnp.sum(most))
    statistics = slots.across(statistics)
    allocate, rank = stage_of(slots.allocate, "allocate"), stage_of(slots.rank, "rank")
    granted = allocate(slots.of(slots.allocate, statistics), total=total, most=most, layers=layers)
    granted = _within_bounds(policy, granted, total=total, most=most, kv_heads=scores.shape[1])

    def take(scores, protected, statistics, budget, in_scope, out_of_scope):  # [K, T], [T], of one layer, [K], [T], [T]
        recent = most_recent(policy, jnp.full_like(budget, total // layers) if equal else budget)
        protected |= last(in_scope, jnp.min(recent))
        unprotected, protected_count = in_scope & ~protected, jnp.sum(protected)
        remaining = jnp.maximum(budget - protected_count, 0)
        ranking, taken = rank(scores, statistics, unprotected, remaining)
        # Candidates that only heads with larger budgets keep in any case.
        ranking = jnp.where(jax.vmap(last, (None, 0))(in_scope, recent), jnp.inf, ranking)
        budget = jnp.minimum(budget, protected_count) + taken
        # If there are more protected tokens than the budget, the last of them are kept.
        latest = jax.vmap(last, (None, 0))(protected, budget)
        kept = out_of_scope | latest | top(ranking, unprotected, taken)
        return kept, budget, jnp.where(out_of_scope, jnp.inf, jnp.where(in_scope, scores, -jnp.inf))

    kept, spent, scores = jax.vmap(take)(
        scores.astype(jnp.float32), protected & in_scope, slots.of(slots.rank, statistics), granted, in_scope,
        out_of_scope,
    )  # fmt: skip
    by_slot = {slots.named(owner): arrays for owner, arrays in zip(slots.deciding, statistics, strict=True)}
    return Selection(kept, spent, scores, by_slot if statistics[1:] else statistics[0])


def _within_bounds(
    policy: Policy, granted: Array, *, total: Int[Array, ""], most: Int[Array, " L"], kv_heads: int
) -> Int[Array, "L K"]:
    """The budgets of `allocate`, clipped to 0, to each layer's tokens, and to `total` per head.

    The pool has capacity for `total` per head, so budgets with a larger sum are cut in the upper layers.

    Raises:
        InputError: budgets of another shape; outside jit, where values are known, also budgets out of bounds.
    """
    name, layers, per_head = type(policy).__name__, len(most), policy.facts.budgets == "heads"
    each = (layers, kv_heads)
    if granted.shape != each and (per_head or granted.shape != (layers,)):
        either = "" if per_head else f"one per layer, {(layers,)}, or "
        raise InputError(f"{name}: allocate returned budgets of shape {granted.shape}: return {either}one per layer "
                         f"and key head, {each}")  # fmt: skip
    granted = jnp.broadcast_to(granted if granted.ndim == 2 else granted[:, None], (layers, kv_heads))
    bounded = jnp.clip(jnp.nan_to_num(granted), 0, most[:, None]).astype(jnp.int32)
    if per_head:  # all heads share the capacity
        bounded, total = bounded.reshape(-1, 1), kv_heads * total
    bounded = jnp.clip(bounded, 0, total - jnp.minimum(jnp.cumsum(bounded, axis=0) - bounded, total)).reshape(each)
    if not isinstance(bounded, jax.core.Tracer) and bool(jnp.any(bounded != granted)):
        returned = granted if per_head else granted[:, 0]
        raise InputError(f"{name}: allocate returned {returned.tolist()} for layers of {most.tolist()} tokens: "
                         f"return whole numbers from 0 to these, with a sum of at most {total}")  # fmt: skip
    return bounded


def shortlist(policy: Policy, observed: Observed, obs: Observation, *, layers: int) -> Bool[Array, " T"]:
    """The candidates of a layer under the policy's cap, the same for all heads.

    A token is ranked by its best rank in any head. So, of C candidates, at least the first C / K of every head are
    included.
    """
    scores = observed.scores.astype(jnp.float32)
    table = jnp.asarray(cap_table(policy, layers=layers, most=obs.in_scope.shape[0]))
    capacity, protected = table[jnp.sum(obs.in_scope)], observed.protected
    protected |= last(obs.in_scope, most_recent(policy, capacity))  # of the largest budget
    unprotected, protected_count = obs.in_scope & ~protected, jnp.sum(protected)

    def best(scores: Float[Array, "K T"], rank: Int[Array, ""]) -> Bool[Array, " T"]:
        """The `rank` best tokens of every head. Protected tokens come first, the last of them before the others."""
        others = jnp.broadcast_to(jnp.maximum(rank - protected_count, 0), scores.shape[:1])
        return last(protected, rank) | jnp.any(top(scores, unprotected, others), axis=0)

    def fits(scores: Float[Array, "K T"], rank: UInt32[Array, ""]) -> Bool[Array, ""]:
        return jnp.sum(best(scores, rank.astype(jnp.int32))) <= capacity

    best_rank, scores = binary_search(scores, obs.in_scope.shape[0].bit_length(), fits)
    rank = best_rank.astype(jnp.int32)
    sure = best(scores, rank)
    return sure | first(best(scores, rank + 1) & ~sure, capacity - jnp.sum(sure))


def stack(layers: Sequence[Observed]) -> Observed:
    """Stacks the results of all layers; shorter arrays are padded along the last axis with their last value."""
    return jax.tree.map(lambda *x: _stack(x), *layers)


def _stack(arrays: tuple[Array, ...]) -> Array:
    if len({x.shape for x in arrays}) > 1:
        longest = max(x.shape[-1] for x in arrays)
        arrays = tuple(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, longest - x.shape[-1])], "edge") for x in arrays)
    return jnp.stack(arrays)


def select(
    policy: Policy,
    q: Float[Array | np.ndarray, "L N T H"],
    k: Float[Array | np.ndarray, "L K T H"],
    v: Float[Array | np.ndarray, "L K T H"],
    is_vision: Bool[Array | np.ndarray, " T"],
    valid: Bool[Array | np.ndarray, " T"] | None = None,
    key: PRNGKeyArray | None = None,
    grid: Int[Array | np.ndarray, "T 3"] | None = None,
    context: LayerContext | None = None,
    until: Int[Array | np.ndarray, " T"] | None = None,
) -> Selection:
    """The tokens that a policy keeps of one prompt.

    Args:
        policy: any policy that does not reduce the prompt.
        q: rotated queries of all layers.
        k: rotated keys. To select per query head, pass k and v repeated to N heads.
        v: values.
        is_vision: which tokens come from an image.
        valid: False for padding; None: all tokens are valid.
        key: for policies that draw at random.
        grid: image, line and column of each token, as in `Inputs.grid`, for policies that smooth scores on the image.
        context: of all layers, with a leading axis L, for policies that use more of the model (`Stages.uses`).
        until: index of the last token that each token attends to, if images are attended to in both directions
            (Gemma); None: the token itself.

    Raises:
        InputError: shapes that do not fit, a missing key, grid or context, or a policy that reduces the prompt.
    """
    key = single_key(key)
    q, k, v, is_vision = (jnp.asarray(x) for x in (q, k, v, is_vision))
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if not fits or q.shape[1] % k.shape[1] or is_vision.shape != q.shape[2:3]:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}, is_vision {is_vision.shape}: expected [L, N, T, H], "
                         "[L, K, T, H] twice and [T], with K dividing N")  # fmt: skip
    valid = jnp.ones(is_vision.shape, bool) if valid is None else jnp.asarray(valid)
    layers, length = q.shape[0], q.shape[2]
    require_fit(policy, layers, key)
    grid, until = (None if x is None else jnp.asarray(x) for x in (grid, until))
    if slots_of(policy).reduce is not None:
        raise InputError(
            f"{type(policy).__name__} reduces the prompt between layers, so queries and keys of the whole prompt do "
            "not show what it keeps; use read_prompt(params, inputs, policy)"
        )
    contexts = [jax.tree.map(lambda x, i=i: x[i], context) for i in range(layers)]
    observations = [
        make_observation(
            policy, q[i], k[i], v[i], is_vision, valid, key,
            layer=i, layers=layers, max_instruction=length, grid=grid, until=until, context=contexts[i],
        )
        for i in range(layers)
    ]  # fmt: skip
    observed = [observe(policy, obs) for obs in observations]
    is_candidate = [valid] * layers
    if policy.cap is not None:
        is_candidate = [
            (valid & ~obs.in_scope) | shortlist(policy, o, obs, layers=layers)
            for o, obs in zip(observed, observations, strict=True)
        ]
    count, vision = jnp.sum(observations[0].in_scope), jnp.broadcast_to(is_vision, (layers, length))
    counts = jnp.full(layers, count)
    return allocate_and_take(
        policy,
        stack(observed),
        vision,
        jnp.stack(is_candidate),
        counts,
        count,
        budget=budget_of(policy, layers=layers, most=length, text=length),
    )


def compress(
    policy: Policy,
    q: Float[Array | np.ndarray, "L N T H"],
    k: Float[Array | np.ndarray, "L K T H"],
    v: Float[Array | np.ndarray, "L K T H"],
    is_vision: Bool[Array | np.ndarray, " T"],
    valid: Bool[Array | np.ndarray, " T"] | None = None,
    key: PRNGKeyArray | None = None,
    grid: Int[Array | np.ndarray, "T 3"] | None = None,
    context: LayerContext | None = None,
) -> tuple[Float[Array, "L K T H"], Float[Array, "L K T H"], Selection]:
    """`select`, and k and v after the policy's merge; the kept ones are the entries of the cache."""
    k, v = jnp.asarray(k), jnp.asarray(v)  # merging uses methods that numpy arrays do not have
    selection = select(policy, q, k, v, is_vision, valid, key, grid, context)
    if (merger := slots_of(policy).merge) is None:
        return k, v, selection
    merge = stage_of(merger, "merge")
    merged = [merge(*args) for args in zip(k, v, selection.kept, selection.scores, strict=True)]
    return jnp.stack([m[0] for m in merged]), jnp.stack([m[1] for m in merged]), selection
