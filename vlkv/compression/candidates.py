"""Observes each layer of a prompt, and finds the entries that may be kept. Every selection runs through this module.

`generate` runs it for all rows, layer by layer during prefill; `select` runs the same functions on given arrays.

Axes: B batch · T prompt · t tokens of one layer · L layers · N query heads · K key heads · H head dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from pallas_kernels.attention_mass import takes_lse
from pallas_kernels.prefill_attention import Attended, gives_mass
from vlkv.cache.packing import CacheSpec
from vlkv.cache.pool import checked_new_tokens
from vlkv.compression.checking import require_context, require_fit
from vlkv.compression.observe import (
    Layer,
    LayerBudget,
    LayerContext,
    LayerRun,
    Measure,
    Observation,
    StackedLayers,
    fields_of,
)
from vlkv.compression.policy import Policy
from vlkv.compression.selection import Observed, Selection, allocate_and_take, observe, shortlist, stack
from vlkv.compression.sizes import Budget, budget_of, cache_spec, cap_bound
from vlkv.compression.slots import slots_of
from vlkv.compression.stages import stage_of
from vlkv.errors import InputError
from vlkv.inputs import Bounds, single_key
from vlkv.masks import tokens_of
from vlkv.sharding.ops import by_row

Number = int | Int[Array, ""]  # of a layer; an array if one loop processes all layers
RowKey = Key[Array, ""] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """The tokens that may be kept, in one layer and row, or in all layers and rows (*B: L B).

    Without a cap, arrays have all tokens of the layer (t), of which `is_candidate` marks those that may be kept. With a
    cap, they have only the layer's shortlist.
    """

    k: Any  # [*B K t H]; of all layers: an array, or a tuple of those of each
    v: Any
    is_vision: Bool[Array, "*B t"]
    is_candidate: Bool[Array, "*B t"]  # may be kept
    source: Int[Array, "*B t"]  # index of the token in the prompt
    in_scope_count: Int[Array, "*B"]  # number of tokens in scope, before a cap
    observed: Observed


def observation(
    policy: Policy, layer: Layer, number: Number, key: RowKey = None, *, layers: int, budget: Budget | None = None
) -> Observation:
    """What the policy observes of one row of a layer. `layers` is the number of layers with full attention.

    Raises:
        InputError: the policy uses something of the context that is not known.
    """
    require_context(policy, layer.context)
    is_candidate = layer.valid if layer.is_candidate is None else layer.is_candidate
    in_scope = is_candidate & layer.is_vision if policy.scope == "vision" else is_candidate
    count, length, bounds = jnp.sum(in_scope), in_scope.shape[0], layer.run.bounds
    budget = budget_of(policy, layers=layers, most=length, text=length) if budget is None else budget
    layer_budget = LayerBudget(  # from tables, because `count` is not known when the program is compiled
        asked=jnp.asarray(budget.mean)[count], mean=jax.lax.div(jnp.asarray(budget.nominal)[count], layers),
        competes=bounds is None or bounds.vision != 0 or policy.scope == "all", layers=layers,
    )  # fmt: skip
    key = None if key is None else jax.random.fold_in(key, number)
    run = dataclasses.replace(layer.run, is_candidate=is_candidate, first=slots_of(policy).first_of(layer.valid))
    fields = vars(layer) | {"is_vision": layer.is_vision & layer.valid, "run": run}
    return Observation(**fields, in_scope=in_scope, budget=layer_budget, key=key, layer=number)


def attend(
    attention: Callable[..., Any], layer: Layer, number: Number, observers: Sequence[Policy], *, layers: int
) -> tuple[Float[Array, "B t N H"], Layer]:
    """Computes the attention of a layer; returns its output, and the layer with what the observers have it measure.

    Where the op can, it returns the log-sum-exps and the sums of `Stages.measures`, which saves a second pass.
    """
    kernels, context = layer.run.kernels, layer.context
    measuring = [policy for policy in observers if slots_of(policy).measuring]
    batch, length = layer.valid.shape

    def measures_of(row: Layer) -> dict[str, Measure]:
        measures: dict[str, Measure] = {}
        for policy in measuring:
            measures |= slots_of(policy).measures(observation(policy, row, number, layers=layers))
        # A sum over few rows is cheaper after the layer; see `Measure`.
        return {name: m for name, m in measures.items() if m.most is None or 2 * m.most >= length}

    repeated = None if context is None else context.repeated
    options: dict[str, Any] = {"return_lse": takes_lse(kernels.attention_mass) or repeated is not None}
    measures = by_row(measures_of, batch)(layer) if measuring and gives_mass(kernels.prefill_attention) else {}
    if measures:
        rows = [jnp.where(layer.valid, measure.rows, 0) for measure in measures.values()]
        options["row_weight"] = jnp.stack(rows, axis=1).astype(jnp.float32)
        options["statistics"] = tuple((measure.statistic, measure.threshold) for measure in measures.values())
    result = attention(**options)
    attended, lse, mass = result if isinstance(result, Attended) else (result, None, None)
    if repeated is not None:  # the rows of the second reading follow those of the prompt
        assert lse is not None and context is not None
        context = dataclasses.replace(context, repeated=dataclasses.replace(repeated, lse=lse[..., length:]))
        lse, mass = lse[..., :length], None if mass is None else mass[..., :length]
    received = {} if mass is None else {name: mass[:, r] for r, name in enumerate(measures)}
    run = dataclasses.replace(layer.run, lse=lse, received=received)
    return attended, dataclasses.replace(layer, run=run, context=context)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a cache before the model runs: all sizes and budgets follow from it."""

    policy: Policy
    layers: int  # with full attention
    length: int  # T
    bounds: Bounds | None = None  # None: unknown, so that the plan has no `spec`
    new_tokens: int = 0

    @classmethod
    def of(
        cls, policy: Policy, prompt: Any, key: RowKey, *, layers: int, new_tokens: int, answer: int | None = None
    ) -> Plan:
        """Checks a policy, and plans its cache for `Inputs` or a `Prompt`. `answer`: `max_new_tokens` of `require_fit`.

        Raises:
            InputError: as `require_fit`; or new_tokens is less than 1.
        """
        new_tokens = checked_new_tokens(new_tokens)
        require_fit(policy, layers, key, max_new_tokens=answer)
        length = prompt.valid.shape[1]
        return cls(policy=policy, layers=layers, length=length, bounds=prompt.bounds, new_tokens=new_tokens)

    @property
    def budget(self) -> Budget:
        """The policy's budget for every number of tokens in scope."""
        text = self.length if self.bounds is None else self.bounds.text
        return budget_of(self.policy, layers=self.layers, most=self.length, text=text)

    @property
    def spec(self) -> CacheSpec:
        """What the policy needs of a cache."""
        assert self.bounds is not None
        return cache_spec(self.policy, layers=self.layers, new_tokens=self.new_tokens, **self.bounds.sizes)

    @property
    def shortlist_length(self) -> int | None:
        """Bound on the entries of a layer's shortlist; None: there is no cap, so all tokens are candidates."""
        if self.policy.cap is None or self.bounds is None:
            return None
        return cap_bound(self.policy, layers=self.layers, vision=self.bounds.vision, text=self.bounds.text)


class Search(NamedTuple):
    """Finds the candidates of a prompt with one policy: layer by layer while the model runs, or in all layers."""

    plan: Plan
    budget: Budget  # that of the plan, or of the same policy with a smaller `keep`
    key: RowKey

    def in_layer(self, number: Number, layer: Layer) -> Candidates:
        """The candidates of one layer in all rows."""
        batch = len(layer.valid)
        keys = None if self.key is None else jax.random.split(self.key, batch)
        return by_row(partial(self._in_row, number), batch)(layer, keys)

    def look(self, number: Number, layer: Layer, key: RowKey) -> tuple[Observation, Observed, Bool[Array, " t"]]:
        """Observes one row of a layer; returns the observation, the policy's results, and which tokens may be kept."""
        policy, layers = self.plan.policy, self.plan.layers
        obs = observation(policy, layer, number, key, layers=layers, budget=self.budget)
        observed, is_candidate = observe(policy, obs), obs.is_candidate
        if policy.cap is not None:
            is_candidate = (is_candidate & ~obs.in_scope) | shortlist(policy, observed, obs, layers=layers)
        return obs, observed, is_candidate

    def _in_row(self, number: Number, layer: Layer, key: RowKey) -> Candidates:
        """`in_layer` for one row. With a cap, copies the shortlist, so that other entries can be freed."""
        obs, observed, is_candidate = self.look(number, layer, key)
        of_layer = fields_of(layer, "k", "v", "is_vision", "source")
        count = jnp.sum(obs.in_scope)
        candidates = Candidates(**of_layer, is_candidate=is_candidate, in_scope_count=count, observed=observed)
        if (most := self.plan.shortlist_length) is None:
            return candidates
        token = tokens_of(is_candidate, min(most, len(layer.valid)))
        present, token = token >= 0, jnp.maximum(token, 0)
        k, v = (x.at[:, token].get(mode="promise_in_bounds") for x in (layer.k, layer.v))
        values = {name: value[:, token] for name, value in observed.values.items()}
        observed = observed._replace(
            scores=observed.scores[:, token], protected=observed.protected[token], values=values
        )
        masks = {"is_vision": layer.is_vision[token], "is_candidate": present, "source": layer.source[token]}
        return dataclasses.replace(candidates, k=k, v=v, observed=observed, **masks)

    def in_all(self, layers: Sequence[Layer] | StackedLayers) -> Candidates | None:
        """The candidates of all layers, as from `stacked`.

        A loop over the layers is compiled once and not once per layer. It is used under jit, without a cap, if all
        layers have arrays of the same shapes, and unless a stage needs `Observation.layer` as an int.
        """
        if self.plan.policy.cap is None and _are_equal(layers):
            if isinstance(layers, StackedLayers):
                read, k, v = layers.__getitem__, layers.record.k, layers.record.v
            else:
                read = partial(jax.lax.switch, branches=[lambda layer=layer: layer for layer in layers])
                k, v = (tuple(getattr(layer, name) for layer in layers) for name in "kv")

            def step(number: Int[Array, ""]) -> Candidates:
                return dataclasses.replace(self.in_layer(number, read(number)), k=(), v=())  # the loop would copy them

            with contextlib.suppress(TypeError):  # jax raises it for an array in `if obs.layer < 2`
                return dataclasses.replace(jax.lax.map(step, jnp.arange(len(layers))), k=k, v=v)
        return stacked([self.in_layer(number, layer) for number, layer in enumerate(layers)], self.plan.length)


def _are_equal(layers: Sequence[Layer] | StackedLayers) -> bool:
    """Whether one loop can process the layers: under jit, if all have arrays of the same shapes."""
    layers = [layers[0]] if isinstance(layers, StackedLayers) else layers
    structures = {(jax.tree.structure(layer), *(x.shape for x in jax.tree.leaves(layer))) for layer in layers}
    return len(structures) == 1 and isinstance(layers[0].k, jax.core.Tracer)


def stacked(layers: Sequence[Candidates], length: int) -> Candidates | None:
    """The candidates of all layers, padded to the longest layer; None if there is no layer.

    The source of a padded token is `length`, that of the prompt: no token.
    """
    if not layers:
        return None
    longest = max(layer.is_candidate.shape[1] for layer in layers)

    def padded(x: Array, fill: int) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, longest - x.shape[-1])], constant_values=fill)

    def joined(arrays: Iterable[Array], fill: int = 0) -> Array:
        return jnp.stack([padded(x, fill) for x in arrays])

    return Candidates(
        k=tuple(layer.k for layer in layers),
        v=tuple(layer.v for layer in layers),
        is_vision=joined(layer.is_vision for layer in layers),
        is_candidate=joined(layer.is_candidate for layer in layers),
        source=joined((layer.source for layer in layers), length),
        in_scope_count=jnp.stack([layer.in_scope_count for layer in layers]),
        observed=stack([layer.observed for layer in layers]),
    )


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
        raise InputError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, is_vision {is_vision.shape}: expected [L, N, T, H], "
            "[L, K, T, H] twice and [T], with K dividing N"
        )
    valid = jnp.ones(is_vision.shape, bool) if valid is None else jnp.asarray(valid)
    layers, length = q.shape[0], q.shape[2]
    require_fit(policy, layers, key)
    grid, until = (None if x is None else jnp.asarray(x) for x in (grid, until))
    if slots_of(policy).reduce is not None:
        raise InputError(
            f"{type(policy).__name__} reduces the prompt between layers, so queries and keys of the whole prompt do "
            "not show what it keeps; use read_prompt(params, inputs, policy)"
        )
    plan = Plan(policy=policy, layers=layers, length=length)
    search = Search(plan, plan.budget, key)
    looks = []
    for i in range(layers):
        run, of_layer = LayerRun(is_candidate=valid, until=until), jax.tree.map(lambda x, i=i: x[i], context)
        layer = Layer(q=q[i], k=k[i], v=v[i], is_vision=is_vision, valid=valid, grid=grid, context=of_layer, run=run)
        looks.append(search.look(i, layer, key))
    observations, observed, candidates = zip(*looks, strict=True)
    count, vision = jnp.sum(observations[0].in_scope), jnp.broadcast_to(is_vision, (layers, length))
    return allocate_and_take(
        policy, stack(observed), vision, jnp.stack(candidates), jnp.full(layers, count), count, budget=search.budget
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
    """Selects tokens as `select` does, and merges; returns keys, values and the selection.

    The keys and values of the kept tokens are the entries of the cache.
    """
    k, v = jnp.asarray(k), jnp.asarray(v)  # policies merge with `.at`, which numpy arrays do not have
    selection = select(policy, q, k, v, is_vision, valid, key, grid, context)
    if (merger := slots_of(policy).merge) is None:
        return k, v, selection
    merge = stage_of(merger, "merge")
    merged = [merge(*args) for args in zip(k, v, selection.kept, selection.scores, strict=True)]
    return jnp.stack([m[0] for m in merged]), jnp.stack([m[1] for m in merged]), selection
