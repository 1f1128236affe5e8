"""Selects again among the entries that a cache holds, with the policy's own stages, and packs them into the same pool.

Axes: as in `vlkv.cache.reselection`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from vlkv.cache.marks import PLACES, Reselection
from vlkv.cache.packing import CacheSpec, pack
from vlkv.cache.parts import slot_parts
from vlkv.cache.pool import PackedCache
from vlkv.cache.reselection import Entries, queries, read
from vlkv.compression.candidates import Candidates, Search, observation
from vlkv.compression.observe import Held, Layer, LayerContext, LayerRun, fields_of
from vlkv.compression.policy import Policy
from vlkv.compression.selection import Observed, Selection, allocate_and_take, observe
from vlkv.compression.sizes import Budget, budget_of, cache_spec, total_of
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.config import RopeConfig
from vlkv.errors import InputError
from vlkv.inputs import Bounds
from vlkv.masks import tokens_of
from vlkv.sharding.ops import by_row


def begin(
    search: Search,
    candidates: Candidates,
    kept: Bool[Array, "L B K T"],
    counts: Int[Array, " B"],
    *,
    heads: int,
    rope: RopeConfig | None,
) -> Reselection:
    """What is needed to select again in the cache of a prompt.

    `counts` is the number of tokens in scope of each row; `heads` and `rope` are those of the model's queries.
    """
    policy, bounds, prompt, key = search.plan.policy, search.plan.bounds, search.plan.length, search.key
    is_vision, values, spec = candidates.is_vision, candidates.observed.values, search.plan.spec
    layers, batch, kv_heads, _ = kept.shape
    assert bounds is not None
    tail = spec.tail(slot_parts(spec.columns(kv_heads)))
    newest, k = min(slots_of(policy).newest, tail), candidates.k[0]
    of_entries = partial(_take, index=jnp.maximum(_indices(kept, spec), 0))
    keys = None if key is None else jax.random.key_data(jax.random.split(key, batch))
    again = Reselection(
        is_vision=of_entries(jnp.broadcast_to(is_vision[:, :, None], kept.shape)),
        tail_is_vision=jnp.zeros((batch, tail), bool),
        before=jnp.full(batch, prompt, jnp.int32),
        total=_total(policy, layers, counts, most=prompt, text=bounds.text),
        rounds=jnp.zeros(batch, jnp.int32),
        key=keys,
        q=jnp.zeros((batch, heads, layers, newest, k.shape[-1]), k.dtype) if newest else None,
        policy=policy,
        bounds=bounds,
        prompt=prompt,
        rope=rope,
        places=tuple(name for name in PLACES if name in values),
    )
    if again.places:
        place = jnp.concatenate([values[name] for name in again.places], axis=-1)
        by_head = jnp.broadcast_to(place[:, :, None], (*kept.shape, place.shape[-1]))
        tail_place = jnp.zeros((batch, tail, place.shape[-1]), jnp.int32)
        again = dataclasses.replace(again, place=of_entries(by_head), tail_place=tail_place)
    return again


def recompress(cache: PackedCache, policy: Policy | None = None) -> PackedCache:
    """Selects again among the entries that a cache holds: those of the prompt and all that have come since.

    The cache has the same size afterwards, with an empty tail. Its entries keep their positions. `generate`, `decode`,
    `decode_step`, `extend` and `Chat` do this by themselves when the tail is full; call it to select earlier, or with
    another policy.

    Args:
        cache: of a policy with `compose(..., every=n)`, or of a method with an interval of its own.
        policy: None: the policy of the cache. Another one may have a smaller budget; its `keep` is a share of the
            entries that the cache holds.

    Raises:
        InputError: the cache has no observers, or another policy needs another cache.
    """
    again = cache.reselection
    if again is None:
        raise InputError(
            "the cache keeps nothing by which its entries could be selected again: make it with "
            "compose(policy, every=n)"
        )
    layers, total = len(again.is_vision), again.total
    spec = _spec(again.policy, again.bounds, layers)
    entries = read(cache, slots_of(again.policy).first if spec.per_head else 0)
    if policy is not None:
        _require_same_cache(policy, again, spec)
        heads, length = entries.held.shape[2:]
        counts = -(-jnp.sum(entries.held, axis=(0, 2, 3)) // (layers * heads))  # of a layer and head, on average
        total = jnp.minimum(_total(policy, layers, counts, most=length, text=length), total)
    policy = again.policy if policy is None else policy
    selection = _select(policy, cache, entries, total, spec)
    kept, k, v, merger = selection.kept & entries.held, entries.k, entries.v, slots_of(policy).merge
    if merger is not None:
        scores = jnp.where(entries.held, selection.scores, -jnp.inf)
        k, v = jax.vmap(jax.vmap(stage_of(merger, "merge")))(k, v, kept, scores)
    in_order = jnp.zeros((*kept.shape[:2], kept.shape[3]), bool)
    packed = pack(spec, k, v, kept, is_vision=in_order, source=entries.number, next_position=cache.next_position)
    rings = cache.rings
    return dataclasses.replace(
        cache,
        **fields_of(packed, "k", "v", "token", "start", "extent"),
        used=jnp.zeros_like(cache.used),
        rings=None if rings is None else dataclasses.replace(rings, first_new=rings.first_new + cache.used),
        reselection=_after(again, entries, _indices(kept, spec), cache.used),
    )


def _select(
    policy: Policy, cache: PackedCache, entries: Entries, total: Int[Array, " B"], spec: CacheSpec
) -> Selection:
    """The entries [L, B, K, T] that stay. In heads with fewer entries than others, some may not exist."""
    valid, is_vision = jnp.any(entries.held, axis=2), jnp.any(entries.is_vision & entries.held, axis=2)
    if spec.per_head:  # then the longest head differs also between layers with equal budgets
        valid = jnp.broadcast_to(jnp.any(valid, axis=0), valid.shape)
    in_layers = jnp.sum(valid, axis=-1)  # [L, B]
    budget, counts = _budgets(total, len(valid), valid.shape[-1]), jnp.max(in_layers, axis=0)
    observed = _observe(policy, cache, entries, (valid, is_vision), budget)

    def choose(observed: Observed, masks: tuple[Array, Array], in_layers: Array, count: Array, budget: Budget) -> Any:
        most = jnp.minimum(in_layers, spec.longest)
        return allocate_and_take(policy, observed, *masks, in_layers, count, budget=budget, most=most)

    choose_all = jax.vmap(choose, in_axes=(1, 1, 1, 0, 0), out_axes=1)
    return choose_all(observed, (is_vision, valid), in_layers, counts, budget)


def _after(again: Reselection, entries: Entries, index: Int[Array, "L B K E"], used: Int[Array, " B"]) -> Reselection:
    """What is known of the selected entries, those at these indices."""
    take = partial(_take, index=jnp.maximum(index, 0))
    return dataclasses.replace(
        again,
        is_vision=take(entries.is_vision),
        place=None if entries.place is None else take(entries.place),
        before=again.before + used,
        rounds=again.rounds + 1,
    )


def with_capacity(cache: PackedCache, count: int | Int[Array, " B"]) -> PackedCache:
    """The cache with free slots for `count` more tokens: selects again if a row has too few. Others are unchanged."""
    if cache.reselection is None:
        return cache
    return jax.lax.cond(has_capacity(cache, count), lambda cache: cache, recompress, cache)


def has_capacity(cache: PackedCache, count: int | Int[Array, " B"]) -> Bool[Array, ""] | bool:
    """Whether all rows can take `count` more tokens before the cache must be selected again."""
    return cache.reselection is None or jnp.all(cache.used + count <= cache.reselection.tail)


def _observe(
    policy: Policy, cache: PackedCache, entries: Entries, masks: tuple[Array, Array], budget: Budget
) -> Observed:
    """Scores and statistics of all layers [L, B, ...]. `masks`: which tokens any head holds, and vision tokens."""
    again, used = cache.reselection, cache.used
    assert again is not None
    batch, layers = len(used), len(again.is_vision)
    by_heads = policy.facts.budgets == "heads" or bool(again.places)
    keys = None
    if again.key is not None:
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(again.key), again.rounds)

    def in_layer(number: Any, entries: Entries, valid: Array, is_vision: Array) -> Observed:
        q, rows = queries(again, jnp.asarray(number), used)
        q = jnp.zeros_like(entries.k) if q is None else q
        most = 1 if again.q is None else again.q.shape[3]
        place = again.split(entries.place)
        positions, grid = (place.get(name) for name in PLACES)
        held = Held(
            entries=entries.held, number=entries.number, is_vision=entries.is_vision, positions=positions, grid=grid,
            rows=rows, prompt=again.prompt, most_rows=most, by_head=by_heads,
        )  # fmt: skip
        context = None
        if positions is not None:
            assert again.rope is not None
            context = LayerContext(positions=positions[:, 0], limit=cache.position_limit, rope=again.rope)
        run = LayerRun(is_candidate=valid, held=held, kernels=cache.kernels)
        grid = None if grid is None else grid[:, 0]
        layer = Layer(
            q=q, k=entries.k, v=entries.v, is_vision=is_vision, valid=valid, grid=grid, context=context, run=run
        )

        def in_row(layer: Layer, budget: Budget, key: Any) -> Observed:
            return observe(policy, observation(policy, layer, number, key, layers=layers, budget=budget))

        return by_row(in_row, batch)(layer, budget, keys)

    try:  # a loop over the layers is compiled once
        return jax.lax.map(lambda x: in_layer(*x), (jnp.arange(layers), entries, *masks))
    except TypeError:  # jax raises it for an array in `if obs.layer < 2`
        each = [in_layer(i, *jax.tree.map(lambda x, i=i: x[i], (entries, *masks))) for i in range(layers)]
        return jax.tree.map(lambda *x: jnp.stack(x), *each)


def _budgets(total: Int[Array, " B"], layers: int, length: int) -> Budget:
    """The budget of each row: the entries that it has kept of the prompt, or its `budget`, whatever it holds now."""
    counts = jnp.arange(length + 1)
    mean = jnp.broadcast_to((total / layers).astype(jnp.float32)[:, None], (len(total), length + 1))
    at_most = jnp.minimum(layers * counts, total[:, None])
    return Budget(mean, at_most, at_most)


def _total(policy: Policy, layers: int, counts: Int[Array, " B"], *, most: int, text: int) -> Int[Array, " B"]:
    """Entries that all layers keep of rows with these numbers of tokens in scope, now and later."""
    if policy.budget is not None:  # a short prompt grows up to the budget
        enough = np.array([layers * (text + most + 4 * policy.budget)])
        return jnp.full_like(counts, total_of(policy, enough, layers=layers, text=text)[0])
    return jnp.asarray(budget_of(policy, layers=layers, most=most, text=text).total)[counts]


def _spec(policy: Policy, bounds: Bounds, layers: int) -> CacheSpec:
    return cache_spec(policy, layers=layers, new_tokens=slots_of(policy).every, **bounds.sizes)


def _indices(kept: Bool[Array, "L B K T"], spec: CacheSpec) -> Int[Array, "L B K E"]:
    """The kept tokens in order; -1 after the last."""
    each = jax.vmap(jax.vmap(jax.vmap(partial(tokens_of, most=spec.longest))))(kept)
    return jnp.pad(each, [(0, 0)] * 3 + [(0, spec.longest - each.shape[-1])], constant_values=-1)


def _take(x: Array, *, index: Int[Array, "L B K E"]) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - index.ndim)), axis=3)


def _require_same_cache(policy: Policy, again: Reselection, spec: CacheSpec) -> None:
    """Raises InputError if a cache of this policy would not fit into the pool."""
    ours, theirs = slots_of(policy), slots_of(again.policy)
    name, cached = type(policy).__name__, type(again.policy).__name__
    if (policy.facts.budgets == "heads") != spec.per_head or ours.storage != theirs.storage:
        raise InputError(f"{name} needs a pool of another kind than {cached}, which made the cache: prefill with it")
    if ours.newest > theirs.newest or set(ours.uses) - set(theirs.uses) or (ours.needs_key and again.key is None):
        raise InputError(f"{name} observes more than the cache of {cached} keeps: prefill with it")
