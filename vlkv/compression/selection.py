"""Runs a policy's stages: `observe` each layer; then `allocate_and_take` budgets and tokens in all layers.

Unbatched. `candidates.py` calls these functions. Axes: L layers · N query heads · K key heads · T tokens · H head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from vlkv.compression.checking import checked_scores
from vlkv.compression.observe import Observation
from vlkv.compression.policy import Policy
from vlkv.compression.sizes import Budget, cap_table, counts_prompt, most_recent
from vlkv.compression.slots import Slots, slots_of
from vlkv.compression.stages import Scores, Statistics, stage_of
from vlkv.errors import InputError
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
    statistics: tuple[Statistics, ...]  # of each method in `Slots.deciding`
    values: dict[str, Float[Array, "K T"]]  # for the decode state


def observe(policy: Policy, obs: Observation) -> Observed:
    """Computes the scores, protected tokens, statistics and decode values of one layer."""
    slots = slots_of(policy)
    scores_of = functools.cache(lambda owner: by_head(functools.partial(checked_scores, owner), obs))
    protected = slots.protect(obs) & obs.in_scope if policy.scope == "all" else jnp.zeros_like(obs.valid)
    values = {} if slots.step is None else slots.step.decode_values(obs, scores_of(slots.step))
    if slots.every and obs.run.held is None:  # places of the entries, for later selections
        positions = None if obs.context is None else obs.context.positions
        places = {"rotation": positions, "grid": obs.grid}
        values = values | {name: place for name, place in places.items() if name in slots.uses and place is not None}
    scores = scores_of(slots.score)
    if obs.run.held is None:
        scores = slots.smoothed(scores, obs)
    elif slots.smooth is not None:  # each head among its own entries
        scores = by_head(lambda obs: slots.smoothed(checked_scores(slots.score, obs), obs), obs)
    if slots.divides_bits and policy.scope == "all":
        pinned = protected | last(obs.in_scope, slots.recent_of(obs.mean_budget))
        highest = jnp.max(scores, axis=1, where=obs.in_scope, initial=-jnp.inf, keepdims=True)
        scores, protected = jnp.where(pinned, highest, scores), jnp.zeros_like(protected)
    # Without tokens in scope there is nothing to allocate; but with "bits", tokens out of scope have digits too.
    are_used = obs.competes or slots.divides_bits

    def statistics(owner: Policy) -> Statistics:
        given = scores if slots.divides_bits else scores_of(owner)
        if not are_used:
            return _zeros_like(stage_of(owner, "statistics"), obs, given)
        arrays: Statistics = stage_of(owner, "statistics")(obs, given)
        if slots.smooth is None or owner != slots.rank:
            return arrays
        smoothed = [name for name in stage_of(owner, "ranked_by") if name != "scores"]
        return arrays | {name: slots.smoothed(arrays[name], obs) for name in smoothed}

    return Observed(scores, protected, tuple(map(statistics, slots.deciding)), values)


def by_head(score: Callable[[Observation], Scores], obs: Observation) -> Scores:
    """The scores of a layer. If heads hold unequal numbers of entries, each head is scored as if it were the only one.

    Then missing entries have less than the lowest score of their head.
    """
    held = obs.run.held
    if held is None or not held.by_head:
        return score(obs)
    heads, context = len(obs.k), obs.context
    own = {name: getattr(held, name) for name in ("entries", "number", "is_vision", "positions", "grid")}

    def of_head(head: Array, own: dict[str, Any], arrays: dict[str, Any]) -> Array:
        only = dataclasses.replace(held, **jax.tree.map(lambda x: x[None], own))
        run = dataclasses.replace(obs.run, is_candidate=own["entries"], held=only)
        masks: dict[str, Any] = {
            "valid": own["entries"],
            "in_scope": own["entries"] & obs.in_scope,
            "is_vision": own["is_vision"],
            "grid": own["grid"],
        }
        where = context
        if where is not None and own["positions"] is not None:
            where = dataclasses.replace(where, positions=own["positions"])
        key = None if obs.key is None else jax.random.fold_in(obs.key, head)
        return score(dataclasses.replace(obs, **arrays, **masks, run=run, context=where, key=key))[0]

    arrays = {"q": obs.q.reshape(heads, -1, *obs.q.shape[1:]), "k": obs.k[:, None], "v": obs.v[:, None]}
    scores = jax.vmap(of_head)(jnp.arange(heads), own, arrays)
    lowest = jnp.min(jnp.where(held.entries, scores, jnp.inf), axis=1, keepdims=True)
    return jnp.where(held.entries, scores, jnp.nextafter(lowest, -jnp.inf))


def _zeros_like(function: Callable[..., Statistics], *args: Any) -> Statistics:
    """Zeros with the shapes of the results of a function, which is traced but not computed."""
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
    most: Int[Array, " L"] | None = None,
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
        most: greatest budget of each layer; None: the number of its tokens in scope.
    """
    layers, slots = len(is_vision), slots_of(policy)
    # All layers have the same budget, but for one token, because their sum may not be a multiple of L.
    equal = policy.facts.budgets == "equal" and slots.reduce is None
    in_scope = is_candidate & is_vision if policy.scope == "vision" else is_candidate
    out_of_scope = is_candidate & ~in_scope
    scores, protected, statistics, _ = observed
    most = jnp.sum(in_scope, axis=1) if most is None else most
    total = jnp.asarray(budget.total)[prompt_count if counts_prompt(policy) else jnp.sum(counts)]
    # After a reduction, `total` may exceed the tokens that are left.
    total = jnp.minimum(total, jnp.sum(most))
    statistics = slots.across(statistics)
    if not slots.evicts:
        return _everything(scores, is_candidate, in_scope, _by_slot(slots, statistics))
    rank = stage_of(slots.rank, "rank")
    granted = _granted(policy, statistics, total=total, most=most, kv_heads=scores.shape[1])

    def take(scores, protected, statistics, budget, in_scope, out_of_scope):  # [K, T], [T], by name, [K], [T], [T]
        recent = most_recent(policy, jnp.full_like(budget, total // layers) if equal else budget)
        # A token is protected in all heads. Heads with larger budgets keep more recent tokens: these get +inf below.
        protected |= last(in_scope, jnp.min(recent))
        unprotected, protected_count = in_scope & ~protected, jnp.sum(protected)
        remaining = jnp.maximum(budget - protected_count, 0)
        ranking, taken = rank(scores, statistics, unprotected, remaining)
        # `protected` is the same for all heads, so it has the fewest recent tokens of any head. Here a head gets all of
        # its recent tokens.
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
    return Selection(kept, spent, scores, _by_slot(slots, statistics))


def _everything(scores: Array, is_candidate: Array, in_scope: Array, extra: Statistics) -> Selection:
    """All candidates, without the computations that would only find out that all are kept."""
    kept = jnp.broadcast_to(is_candidate[:, None], scores.shape)
    budgets = jnp.broadcast_to(jnp.sum(in_scope, axis=1, dtype=jnp.int32)[:, None], scores.shape[:2])
    of_candidates = jnp.where(in_scope[:, None], scores.astype(jnp.float32), jnp.inf)
    return Selection(kept, budgets, jnp.where(kept, of_candidates, -jnp.inf), extra)


def _by_slot(slots: Slots, statistics: tuple[Statistics, ...]) -> Statistics:
    """`Selection.extra` of the statistics of all layers."""
    by_slot = {slots.named(owner): arrays for owner, arrays in zip(slots.deciding, statistics, strict=True)}
    return by_slot if statistics[1:] else statistics[0]


def _granted(
    policy: Policy, statistics: tuple[Statistics, ...], *, total: Int[Array, ""], most: Int[Array, " L"], kv_heads: int
) -> Int[Array, "L K"]:
    """The budgets of `allocate`, within bounds."""
    slots = slots_of(policy)
    granted = stage_of(slots.allocate, "allocate")(
        slots.of(slots.allocate, statistics), total=total, most=most, layers=len(most)
    )
    return _within_bounds(policy, granted, total=total, most=most, kv_heads=kv_heads)


def _within_bounds(
    policy: Policy, granted: Array, *, total: Int[Array, ""], most: Int[Array, " L"], kv_heads: int
) -> Int[Array, "L K"]:
    """The budgets of `allocate`, clipped to 0, to each layer's tokens, and to `total` per head.

    The pool has capacity for `total` per head, so budgets with a larger sum are cut in the upper layers.

    Raises:
        InputError: budgets of another shape; outside jit, where values are known, also budgets out of bounds.
    """
    name, layers, per_head = type(policy).__name__, len(most), policy.facts.budgets == "heads"
    shape = (layers, kv_heads)
    if granted.shape != shape and (per_head or granted.shape != (layers,)):
        per_layer = "" if per_head else f"one per layer, {(layers,)}, or "
        raise InputError(f"{name}: allocate returned budgets of shape {granted.shape}: return {per_layer}one per layer "
                         f"and key head, {shape}")  # fmt: skip
    granted = jnp.broadcast_to(granted if granted.ndim == 2 else granted[:, None], (layers, kv_heads))
    bounded = jnp.clip(jnp.nan_to_num(granted), 0, most[:, None]).astype(jnp.int32)
    if per_head:  # all heads share the capacity
        bounded, total = bounded.reshape(-1, 1), kv_heads * total
    bounded = jnp.clip(bounded, 0, total - jnp.minimum(jnp.cumsum(bounded, axis=0) - bounded, total)).reshape(shape)
    if not isinstance(bounded, jax.core.Tracer) and bool(jnp.any(bounded != granted)):
        returned = granted if per_head else granted[:, 0]
        raise InputError(f"{name}: allocate returned {returned.tolist()} for layers of {most.tolist()} tokens: "
                         f"return whole numbers from 0 to these, with a sum of at most {total}")  # fmt: skip
    return bounded


def shortlist(policy: Policy, observed: Observed, obs: Observation, *, layers: int) -> Bool[Array, " T"]:
    """The candidates of a layer under the policy's cap, the same for all heads.

    A token is ranked by its best rank in any head: the candidates are the r best tokens of every head, for the
    largest r for which they are not too many. So, of C candidates, at least the C / K best of every head are included.
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

    # The search returns the scores that it has compared: XLA might round them differently if it computed them again.
    best_rank, scores = binary_search(scores, obs.in_scope.shape[0].bit_length(), fits)
    rank = best_rank.astype(jnp.int32)
    shortlisted = best(scores, rank)
    # The tokens with the next rank do not all fit: the first of them fill the shortlist.
    return shortlisted | first(best(scores, rank + 1) & ~shortlisted, capacity - jnp.sum(shortlisted))


def stack(layers: Sequence[Observed]) -> Observed:
    """Stacks the results of all layers; shorter arrays are padded along the last axis with their last value."""
    return jax.tree.map(lambda *x: _stack(x), *layers)


def _stack(arrays: tuple[Array, ...]) -> Array:
    if len({x.shape for x in arrays}) > 1:
        longest = max(x.shape[-1] for x in arrays)
        arrays = tuple(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, longest - x.shape[-1])], "edge") for x in arrays)
    return jnp.stack(arrays)
