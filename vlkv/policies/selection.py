"""From a policy's stages to what is kept: observe every layer, allocate once, take the best of each layer.

Unbatched. `generate` runs these two functions under vmap, layer by layer during prefill; `select` runs them on given
queries and keys. One path, so they cannot disagree. Axes as in DESIGN: L layers · N, K heads · T tokens · H head dim.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from vlkv.errors import InputError
from vlkv.observe import Observation, ordinal
from vlkv.policies.policy import Policy, Statistics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What a policy keeps.

    `kept`, and `scores` with +inf out of scope (always kept) and -inf for invalid tokens; `budgets` counts the tokens
    in scope; `extra` holds the method's own intermediate arrays, each with a leading axis L.
    """

    kept: Bool[Array, "*B L K T"]
    budgets: Int[Array, "*B L K"]
    scores: Float[Array, "*B L K T"]
    extra: dict[str, Array]


class Observed(NamedTuple):
    """What is remembered of one layer until all layers have been seen: O(K T), never keys or queries."""

    scores: Float[Array, "K T"]
    protected: Bool[Array, " T"]
    statistics: Statistics
    values: dict[str, Float[Array, "K T"]]  # for the memory


def observe(
    policy: Policy,
    q: Float[Array, "N T H"],
    k: Float[Array, "K T H"],
    v: Float[Array, "K T H"],
    is_vision: Bool[Array, " T"],
    valid: Bool[Array, " T"],
    key: Key[Array, ""] | None,
    *,
    layer: int,
    layers: int,
    max_instruction: int,
) -> Observed:
    """Scores and statistics of one layer."""
    in_scope = valid & is_vision if policy.scope == "vision" else valid
    obs = Observation(
        q=q, k=k, v=v, is_vision=is_vision & valid, valid=valid, in_scope=in_scope,
        mean_budget=_total(policy, in_scope, layers) // layers,
        key=None if key is None else jax.random.fold_in(key, layer),
        layer=layer, max_instruction=max_instruction,
    )  # fmt: skip
    scores = policy.score(obs)
    protected = policy.protect(obs) & in_scope if policy.scope == "all" else jnp.zeros_like(valid)
    return Observed(scores, protected, policy.statistics(obs, scores), policy.remember(obs, scores))


def allocate_and_take(
    policy: Policy, observed: tuple[Observed, ...], is_vision: Bool[Array, " T"], valid: Bool[Array, " T"]
) -> Selection:
    """Budgets from all layers' statistics, then the best tokens of each layer; ties go to the earlier token."""
    layers = len(observed)
    in_scope = valid & is_vision if policy.scope == "vision" else valid
    out_of_scope = valid & ~in_scope
    statistics = jax.tree.map(lambda *x: jnp.stack(x), *(o.statistics for o in observed))
    most = jnp.sum(in_scope)
    total = _total(policy, in_scope, layers)
    granted = policy.allocate(statistics, total=total, most=most, layers=layers)
    kv_heads = observed[0].scores.shape[0]
    granted = jnp.broadcast_to(granted if granted.ndim == 2 else granted[:, None], (layers, kv_heads))  # [L, K]
    # The pool has room for `total`: an allocation that hands out more is cut short in the upper layers.
    granted = jnp.clip(granted, 0, most)
    granted = jnp.clip(granted, 0, total - jnp.minimum(jnp.cumsum(granted, axis=0) - granted, total))

    def take(scores, protected, statistics, budget):  # [K, T], [T], of one layer, [K]
        spare = jnp.maximum(budget - jnp.sum(protected), 0)
        order, taken = policy.rank(scores, statistics, in_scope & ~protected, spare)
        budget = budget - spare + taken
        scores = jnp.where(out_of_scope, jnp.inf, jnp.where(in_scope, scores, -jnp.inf))
        # Text that stays, protected, the rest, padding: no score, however large or infinite, crosses these borders.
        tier = jnp.where(out_of_scope, 0, jnp.where(protected, 1, jnp.where(in_scope, 2, 3)))
        within = jnp.where(protected, -ordinal(valid).astype(jnp.float32), -order)
        best_first = jnp.lexsort((within, jnp.broadcast_to(tier, within.shape)), axis=-1)
        count = (budget + jnp.sum(out_of_scope))[:, None]
        taken = jnp.broadcast_to(jnp.arange(scores.shape[1]) < count, scores.shape)
        kept = jnp.put_along_axis(jnp.zeros(scores.shape, bool), best_first, taken, axis=-1, inplace=False)
        return kept & valid, budget, scores

    kept, spent, scores = jax.vmap(take)(
        jnp.stack([o.scores.astype(jnp.float32) for o in observed]),
        jnp.stack([o.protected for o in observed]),
        statistics,
        granted.astype(jnp.int32),
    )
    return Selection(kept, spent, scores, statistics)


def select(
    policy: Policy,
    q: Float[Array | np.ndarray, "L N T H"],
    k: Float[Array | np.ndarray, "L K T H"],
    v: Float[Array | np.ndarray, "L K T H"],
    is_vision: Bool[Array | np.ndarray, " T"],
    valid: Bool[Array | np.ndarray, " T"] | None = None,
    key: Key[Array, ""] | None = None,
) -> Selection:
    """What would this policy keep of one prompt?

    Args:
        policy: any policy.
        q: rotated queries of all layers.
        k: rotated keys. For a choice per query head pass k and v repeated to N heads.
        v: values.
        is_vision: which tokens come from an image.
        valid: which tokens are no padding; None: all.
        key: for policies that draw at random.

    Raises:
        InputError: shapes that do not fit, or no key where one is needed.
    """
    observed, valid = _observe_all(policy, q, k, v, is_vision, valid, key)
    return allocate_and_take(policy, observed, jnp.asarray(is_vision), valid)


def compress(
    policy: Policy,
    q: Float[Array | np.ndarray, "L N T H"],
    k: Float[Array | np.ndarray, "L K T H"],
    v: Float[Array | np.ndarray, "L K T H"],
    is_vision: Bool[Array | np.ndarray, " T"],
    valid: Bool[Array | np.ndarray, " T"] | None = None,
    key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, "L K T H"], Float[Array, "L K T H"], Selection]:
    """As `select`, with the entries that would go into the cache: where kept, k and v after the policy's merge."""
    observed, valid = _observe_all(policy, q, k, v, is_vision, valid, key)
    selection = allocate_and_take(policy, observed, jnp.asarray(is_vision), valid)
    merged = [policy.merge(*args) for args in zip(k, v, selection.kept, selection.scores, strict=True)]
    return jnp.stack([m[0] for m in merged]), jnp.stack([m[1] for m in merged]), selection


def require_key(policy: Policy, key: Key[Array, ""] | None) -> None:
    """Raises InputError if the policy draws at random and there is nothing to draw from."""
    if policy.needs_key and key is None:
        raise InputError(f"{type(policy).__name__} draws at random: pass key=jax.random.key(seed)")


def _observe_all(policy, q, k, v, is_vision, valid, key) -> tuple[tuple[Observed, ...], Array]:
    require_key(policy, key)
    q, k, v, is_vision = (jnp.asarray(x) for x in (q, k, v, is_vision))
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if not fits or q.shape[1] % k.shape[1] or is_vision.shape != q.shape[2:3]:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}, is_vision {is_vision.shape}: expected [L, N, T, H], "
                         "[L, K, T, H] twice and [T], with K dividing N")  # fmt: skip
    valid = jnp.ones(is_vision.shape, bool) if valid is None else jnp.asarray(valid)
    layers, length = q.shape[0], q.shape[2]
    observed = tuple(
        observe(policy, q[i], k[i], v[i], is_vision, valid, key, layer=i, layers=layers, max_instruction=length)
        for i in range(layers)
    )
    return observed, valid


def _total(policy: Policy, in_scope: Bool[Array, " T"], layers: int) -> Int[Array, ""]:
    return jnp.asarray(policy.totals(layers=layers, most=in_scope.shape[0]))[jnp.sum(in_scope)]
