"""What a policy finds in the layers of a prompt: the entries that it may keep, and what it measures of them.

Axes: B batch · T prompt · t tokens of one layer · L layers · N query heads · K key heads · H head dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from vlkv.compression.policy import Policy
from vlkv.compression.selection import Observed, observe, shortlist, stack
from vlkv.compression.sizes import Budget, cap_bound
from vlkv.generation.layer_prompt import LayerPrompt, observation
from vlkv.generation.prompt import Prompt
from vlkv.inputs import Inputs
from vlkv.masks import tokens_of
from vlkv.sharding.ops import by_row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """The candidates of one layer and row, or of all (*B: L B). Without a cap these are all tokens, with a mask."""

    is_vision: Bool[Array, "*B t"]
    is_candidate: Bool[Array, "*B t"]  # may be kept
    source: Int[Array, "*B t"]  # index of the token in the prompt
    in_scope_count: Int[Array, "*B"]  # number of tokens in scope, before a cap
    observed: Observed


Looked = tuple[Array, Array, Candidates]  # keys and values [*B, K, t, H] of one layer, and its candidates
Look = Callable[[int | Int[Array, ""], LayerPrompt], Looked]  # for the number of a layer and all rows


class Found(NamedTuple):
    """The candidates of all layers, None if there is no layer, and the keys and values of each layer."""

    k: tuple[Float[Array, "B K _t H"], ...] = ()
    v: tuple[Float[Array, "B K _t H"], ...] = ()
    candidates: Candidates | None = None


def _look(
    policy: Policy,
    prompt: LayerPrompt,
    key: Key[Array, ""] | None,
    *,
    layer: int | Int[Array, ""],
    layers: int,
    bounds: Inputs | Prompt,
    budget: Budget,
    kernels: Kernels | None,
) -> Looked:
    """Observes one layer of one row. With a cap, the result has only the layer's shortlist."""
    more = max(0, len(prompt.valid) - bounds.valid.shape[1])  # observers from the answer
    obs = observation(
        policy, prompt, key, layer=layer, layers=layers, max_instruction=bounds.max_instruction, budget=budget,
        kernels=kernels, max_vision=bounds.max_vision, max_text=bounds.max_text + more,
    )  # fmt: skip
    observed, count = observe(policy, obs), jnp.sum(obs.in_scope)
    if policy.cap is None:
        return obs.k, obs.v, Candidates(prompt.is_vision, prompt.is_candidate, prompt.source, count, observed)
    is_candidate = (prompt.is_candidate & ~obs.in_scope) | shortlist(policy, observed, obs, layers=layers)
    most = cap_bound(policy, layers=layers, vision=bounds.max_vision, text=bounds.max_text)
    most = min(most, len(prompt.valid))
    order = tokens_of(is_candidate, most)
    is_candidate, order = order >= 0, jnp.maximum(order, 0)
    values = {name: value[:, order] for name, value in observed.values.items()}
    observed = observed._replace(scores=observed.scores[:, order], protected=observed.protected[order], values=values)
    k, v = (x.at[:, order].get(mode="promise_in_bounds") for x in (obs.k, obs.v))
    return k, v, Candidates(prompt.is_vision[order], is_candidate, prompt.source[order], count, observed)


def observer(
    policy: Policy,
    bounds: Inputs | Prompt,
    budget: Budget,
    *,
    layers: int,
    key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> Look:
    """A function from a layer's number and its LayerPrompt, for all rows, to its candidates."""
    batch = bounds.valid.shape[0]
    keys = None if key is None else jax.random.split(key, batch)

    def look(i: int | Int[Array, ""], prompt: LayerPrompt) -> Looked:
        one = partial(_look, policy, layer=i, layers=layers, bounds=bounds, budget=budget, kernels=kernels)
        return by_row(one, batch)(prompt, keys)

    return look


def find(look: Look, layers: tuple[LayerPrompt, ...], length: int, *, capped: bool) -> Found:
    """`stacked` of what `look` finds in the layers of a prompt, from one loop if possible, which is compiled once.

    Not outside jit or with a cap; nor if layers have different tokens, or a stage needs the layer's number as an int.
    """
    kinds = {(jax.tree.structure(layer), *(x.shape for x in jax.tree.leaves(layer))) for layer in layers}
    if not capped and len(kinds) == 1 and isinstance(layers[0].k, jax.core.Tracer):
        reads = [lambda layer=layer: layer for layer in layers]
        with contextlib.suppress(TypeError):  # of jax, for example for `if obs.layer < 2`
            found = jax.lax.map(lambda i: look(i, jax.lax.switch(i, reads))[2], jnp.arange(len(layers)))
            k, v = (tuple(jnp.swapaxes(getattr(layer, name), 1, 2) for layer in layers) for name in "kv")
            return Found(k, v, found)
    return stacked([look(i, layer) for i, layer in enumerate(layers)], length)


def stacked(layers: Sequence[Looked], length: int) -> Found:
    """What was found in all layers, padded to the longest layer.

    The source of a padded token is `length`, that of the prompt: no token.
    """
    if not layers:
        return Found()
    k, v, found = zip(*layers, strict=True)
    longest = max(layer.is_candidate.shape[1] for layer in found)

    def joined(arrays: Iterable[Array], fill: int = 0) -> Array:
        return jnp.stack([_lengthen(x, longest, fill) for x in arrays])

    candidates = Candidates(
        is_vision=joined(layer.is_vision for layer in found),
        is_candidate=joined(layer.is_candidate for layer in found),
        source=joined((layer.source for layer in found), length),
        in_scope_count=jnp.stack([layer.in_scope_count for layer in found]),
        observed=stack([layer.observed for layer in found]),
    )
    return Found(k, v, candidates)


def _lengthen(x: Array, length: int, fill: int = 0) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])], constant_values=fill)
