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

from pallas_kernels import Kernels
from vlkv.errors import InputError
from vlkv.observe import Observation, first, largest, last, top
from vlkv.policies.policy import Policy, Statistics, checked_scores, require_policy


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
    extra: Statistics


class Observed(NamedTuple):
    """What is remembered of one layer until all layers have been seen: O(K T), never keys or queries."""

    scores: Float[Array, "K T"]
    protected: Bool[Array, " T"]
    statistics: Statistics
    values: dict[str, Float[Array, "K T"]]  # for the memory


def see(
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
    stays: Bool[Array, " T"] | None = None,
    grid: Int[Array, "T 3"] | None = None,
    lse: Float[Array, "N T"] | None = None,
    kernels: Kernels | None = None,
) -> Observation:
    """One layer as the policy's stages see it; `stays` marks what may be kept, None: all that is valid."""
    stays = valid if stays is None else stays
    in_scope = stays & is_vision if policy.scope == "vision" else stays
    table = jnp.asarray(policy.totals(layers=layers, most=in_scope.shape[0]))
    return Observation(
        q=q, k=k, v=v, is_vision=is_vision & valid, valid=valid, in_scope=in_scope,
        mean_budget=table[jnp.sum(in_scope)] // layers,
        key=None if key is None else jax.random.fold_in(key, layer),
        layer=layer, max_instruction=max_instruction, grid=grid, lse=lse,
        kernels=Kernels() if kernels is None else kernels,
    )  # fmt: skip


def observe(policy: Policy, obs: Observation) -> Observed:
    """Scores and statistics of one layer."""
    scores = checked_scores(policy, obs)
    protected = policy.protect(obs) & obs.in_scope if policy.scope == "all" else jnp.zeros_like(obs.valid)
    return Observed(scores, protected, policy.statistics(obs, scores), policy.remember(obs, scores))


def allocate_and_take(
    policy: Policy,
    observed: tuple[Observed, ...],
    is_vision: Bool[Array, "L T"],
    stays: Bool[Array, "L T"],
    held: Int[Array, " L"],
    seen: Int[Array, ""],
    *,
    bound: int,
) -> Selection:
    """Budgets from all layers' statistics, then the best tokens of each layer; ties go to the earlier token.

    Args:
        policy: any policy.
        observed: of each layer; a layer that holds fewer tokens has shorter arrays.
        is_vision: of each layer's tokens, padded to the longest layer.
        stays: which of them are there and may be kept.
        held: tokens in scope that each layer held before a cap.
        seen: tokens in scope that the prompt had.
        bound: a static bound on both.
    """
    layers = len(is_vision)
    in_scope = stays & is_vision if policy.scope == "vision" else stays
    out_of_scope = stays & ~in_scope
    scores, protected, statistics, _ = jax.tree.map(lambda *x: _stack(x), *observed)
    most = jnp.sum(in_scope, axis=1)
    # A method may count what the prompt had, not what is left of it.
    total = jnp.minimum(policy.total(held, seen, layers=layers, most=bound), jnp.sum(most))
    granted = policy.allocate(statistics, total=total, most=most, layers=layers)
    granted = _within_bounds(policy, granted, total=total, most=most, kv_heads=scores.shape[1])

    def take(scores, protected, statistics, budget, in_scope, out_of_scope):  # [K, T], [T], of one layer, [K], [T], [T]
        rest, certain = in_scope & ~protected, jnp.sum(protected)
        order, taken = policy.rank(scores, statistics, rest, jnp.maximum(budget - certain, 0))
        budget = jnp.minimum(budget, certain) + taken
        # Where even the protected are too many, the last of them stay.
        latest = jax.vmap(last, (None, 0))(protected, budget)
        kept = out_of_scope | latest | top(order, rest, taken)
        return kept, budget, jnp.where(out_of_scope, jnp.inf, jnp.where(in_scope, scores, -jnp.inf))

    kept, spent, scores = jax.vmap(take)(
        scores.astype(jnp.float32), protected & in_scope, statistics, granted, in_scope, out_of_scope
    )
    return Selection(kept, spent, scores, statistics)


def _within_bounds(
    policy: Policy, granted: Array, *, total: Int[Array, ""], most: Int[Array, " L"], kv_heads: int
) -> Int[Array, "L K"]:
    """What `allocate` returned, with 0 in the place of less, cut to what each layer holds and to `total`.

    The pool has capacity for `total`. So an allocation that hands out more is cut in the upper layers.

    Raises:
        InputError: budgets of another shape, or, where their values are known (under jit they are not), out of bounds.
    """
    name, layers = type(policy).__name__, len(most)
    if granted.shape not in ((layers,), (layers, kv_heads)):
        raise InputError(f"{name}: allocate returned budgets of shape {granted.shape}: return one per layer, "
                         f"{(layers,)}, or per layer and key head, {(layers, kv_heads)}")  # fmt: skip
    granted = jnp.broadcast_to(granted if granted.ndim == 2 else granted[:, None], (layers, kv_heads))
    whole = jnp.clip(jnp.nan_to_num(granted), 0, most[:, None]).astype(jnp.int32)
    whole = jnp.clip(whole, 0, total - jnp.minimum(jnp.cumsum(whole, axis=0) - whole, total))
    if not isinstance(whole, jax.core.Tracer) and bool(jnp.any(whole != granted)):
        raise InputError(f"{name}: allocate returned {granted[:, 0].tolist()} for layers that hold {most.tolist()} "
                         f"tokens: return whole numbers from 0 to that, at most {total} in all")  # fmt: skip
    return whole


def shortlist(policy: Policy, observed: Observed, obs: Observation, *, layers: int) -> Bool[Array, " T"]:
    """The tokens of a layer that may still be kept under the policy's cap, the same for all heads.

    Where heads rank apart, a token's best rank counts, so every head is sure of its first C / K.
    """
    scores = observed.scores.astype(jnp.float32)
    rest, certain = obs.in_scope & ~observed.protected, jnp.sum(observed.protected)
    table = jnp.asarray(policy.cap_counts(layers=layers, most=obs.in_scope.shape[0]))
    room = table[jnp.sum(obs.in_scope)]

    def best(rank: Int[Array, ""]) -> Bool[Array, " T"]:
        """So many of every head's best: first the protected, from the last, whatever their scores."""
        others = jnp.broadcast_to(jnp.maximum(rank - certain, 0), scores.shape[:1])
        return last(observed.protected, rank) | jnp.any(top(scores, rest, others), axis=0)

    bits = obs.in_scope.shape[0].bit_length()
    rank = largest(bits, lambda rank: jnp.sum(best(rank.astype(jnp.int32))) <= room).astype(jnp.int32)
    sure = best(rank)
    return sure | first(best(rank + 1) & ~sure, room - jnp.sum(sure))


def _stack(arrays: tuple[Array, ...]) -> Array:
    """One array for all layers; where layers hold fewer tokens, the last axis grows by its last value."""
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
    key: Key[Array, ""] | None = None,
    grid: Int[Array | np.ndarray, "T 3"] | None = None,
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
        grid: where on an image each token lies, as in `Inputs.grid`, for policies that smooth scores on it.

    Raises:
        InputError: shapes that do not fit, no key or grid where one is needed, or a policy that shortens the prompt
            instead.
    """
    return _choose(policy, q, k, v, is_vision, valid, key, grid)


def compress(
    policy: Policy,
    q: Float[Array | np.ndarray, "L N T H"],
    k: Float[Array | np.ndarray, "L K T H"],
    v: Float[Array | np.ndarray, "L K T H"],
    is_vision: Bool[Array | np.ndarray, " T"],
    valid: Bool[Array | np.ndarray, " T"] | None = None,
    key: Key[Array, ""] | None = None,
    grid: Int[Array | np.ndarray, "T 3"] | None = None,
) -> tuple[Float[Array, "L K T H"], Float[Array, "L K T H"], Selection]:
    """As `select`, with the entries that would go into the cache: where kept, k and v after the policy's merge."""
    selection = _choose(policy, q, k, v, is_vision, valid, key, grid)
    merged = [policy.merge(*args) for args in zip(k, v, selection.kept, selection.scores, strict=True)]
    return jnp.stack([m[0] for m in merged]), jnp.stack([m[1] for m in merged]), selection


def require_32_bits() -> None:
    """Raises InputError under `jax_enable_x64`, which would make the states of the kernels and all counts wider."""
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
        raise InputError("vlkv computes in 32 bits: switch jax_enable_x64 off, or call it within jax.enable_x64(False)")


def require_fit(policy: Policy, layers: int, key: Key[Array, ""] | None) -> None:
    """Raises InputError if it is no policy, does not fit the model, or draws at random and has nothing to draw from.

    Also if jax is set to 64 bits.
    """
    require_policy(policy)
    require_32_bits()
    policy.check_model(layers)
    if policy.needs_key and key is None:
        raise InputError(f"{type(policy).__name__} draws at random: pass key=jax.random.key(seed)")


def _choose(policy, q, k, v, is_vision, valid, key, grid) -> Selection:
    q, k, v, is_vision = (jnp.asarray(x) for x in (q, k, v, is_vision))
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[2:] == k.shape[2:]
    if not fits or q.shape[1] % k.shape[1] or is_vision.shape != q.shape[2:3]:
        raise InputError(f"q {q.shape}, k {k.shape}, v {v.shape}, is_vision {is_vision.shape}: expected [L, N, T, H], "
                         "[L, K, T, H] twice and [T], with K dividing N")  # fmt: skip
    valid = jnp.ones(is_vision.shape, bool) if valid is None else jnp.asarray(valid)
    layers, length = q.shape[0], q.shape[2]
    require_fit(policy, layers, key)
    if policy.needs_grid and grid is None:
        raise InputError(f"{type(policy).__name__} smooths scores on the image: pass grid=inputs.grid[row]")
    grid = None if grid is None else jnp.asarray(grid)
    if policy.reducer is not None:
        raise InputError(
            f"{type(policy).__name__} shortens the prompt while it is read: given queries and keys cannot say what it "
            "keeps; read_prompt(params, inputs, policy) does"
        )
    seen = [
        see(policy, q[i], k[i], v[i], is_vision, valid, key, layer=i, layers=layers, max_instruction=length, grid=grid)
        for i in range(layers)
    ]
    observed = tuple(observe(policy, obs) for obs in seen)
    stays = [valid] * layers
    if policy.cap is not None:
        stays = [
            (valid & ~obs.in_scope) | shortlist(policy, o, obs, layers=layers)
            for o, obs in zip(observed, seen, strict=True)
        ]
    count, vision = jnp.sum(seen[0].in_scope), jnp.broadcast_to(is_vision, (layers, length))
    held = jnp.full(layers, count)
    return allocate_and_take(policy, observed, vision, jnp.stack(stays), held, count, bound=length)
