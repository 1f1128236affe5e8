"""One layer of a prompt: what it processed, how a policy observes it, and what its attention measures for the policy.

Axes: B batch · T tokens of the prompt · t tokens of one layer · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from pallas_kernels.attention_mass import takes_lse
from pallas_kernels.prefill_attention import Attended, gives_mass
from vlkv.compression.observe import LayerContext, Measure, Observation
from vlkv.compression.policy import Policy
from vlkv.compression.selection import make_observation
from vlkv.compression.slots import slots_of
from vlkv.families import Model
from vlkv.inputs import Inputs
from vlkv.sharding.ops import by_row


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPrompt:
    """Queries, keys and values of one layer for the tokens that it processed: the whole prompt unless it is reduced.

    Keys and values are what a full cache would contain; the queries are used for scores.
    """

    q: Float[Array, "*B t N H"]  # rotated
    k: Float[Array, "*B t K H"]
    v: Float[Array, "*B t K H"]
    is_vision: Bool[Array, "*B t"]
    valid: Bool[Array, "*B t"]
    is_candidate: Bool[Array, "*B t"]  # candidates for the cache
    source: Int[Array, "*B t"]  # index of the token in the prompt
    grid: Int[Array, "*B t 3"]  # (image number in the prompt, line, column) of the patch; -1: none
    context: LayerContext | None = None
    until: Int[Array, "*B t"] | None = None  # last token that each token attends to; None: itself
    lse: Float[Array, "*B N t"] | None = None  # log-sum-exp of each query's logits; None: kernels do not use it
    received: dict[str, Float[Array, "*B N t"]] = dataclasses.field(default_factory=dict)  # as in Observation


def context_of(
    params: Model, policy: Policy | None, layer: int, positions: Array, v: Array, **known: Any
) -> LayerContext:
    """What methods may use of the model in this layer. Norms are computed only for a policy that uses them."""
    uses = () if policy is None else slots_of(policy).uses
    norms = params.decoder.layers[layer].out.norms(v) if "output_norm" in uses else None
    return LayerContext(positions=positions, output_norm=norms, rope=params.decoder.rope, **known)


def observation(policy: Policy, prompt: LayerPrompt, key: Key[Array, ""] | None, **options: Any) -> Observation:
    """`make_observation` of one row of a layer."""
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (prompt.q, prompt.k, prompt.v))
    return make_observation(
        policy, q, k, v, prompt.is_vision, prompt.valid, key, is_candidate=prompt.is_candidate, grid=prompt.grid,
        until=prompt.until, lse=prompt.lse, context=prompt.context, received=prompt.received, **options,
    )  # fmt: skip


def attend_and_measure(
    attention: Callable[..., Any],
    prompt: LayerPrompt,
    observers: Sequence[Policy],
    layer: int,
    layers: int,
    inputs: Inputs,
    kernels: Kernels,
) -> tuple[Array, LayerPrompt]:
    """The attention of a layer, and the layer with what attention has measured for these policies."""
    given = dict(layer=layer, layers=layers, max_instruction=inputs.max_instruction, kernels=kernels)

    def ask(prompt: LayerPrompt) -> dict[str, Measure]:  # of one row
        found: dict[str, Measure] = {}
        for policy in observers:
            found |= slots_of(policy).measures(observation(policy, prompt, None, **given))
        length = len(prompt.valid)
        return {name: m for name, m in found.items() if m.most is None or 2 * m.most >= length}

    repeated = None if prompt.context is None else prompt.context.repeated
    options: dict[str, Any] = {"return_lse": takes_lse(kernels.attention_mass) or repeated is not None}
    measures = by_row(ask, inputs.valid.shape[0])(prompt) if gives_mass(kernels.prefill_attention) else {}
    if measures:
        rows = [jnp.where(prompt.valid, measure.rows, 0) for measure in measures.values()]
        options["row_weight"] = jnp.stack(rows, axis=1).astype(jnp.float32)
        options["statistics"] = tuple((measure.statistic, measure.threshold) for measure in measures.values())
    found = attention(**options)
    attended, lse, mass = found if isinstance(found, Attended) else (found, None, None)
    length, context = prompt.valid.shape[1], prompt.context
    if repeated is not None:
        assert lse is not None and context is not None
        context = dataclasses.replace(context, repeated=dataclasses.replace(repeated, lse=lse[..., length:]))
        lse, mass = lse[..., :length], None if mass is None else mass[..., :length]
    received = {} if mass is None else {name: mass[:, r] for r, name in enumerate(measures)}
    return attended, dataclasses.replace(prompt, lse=lse, received=received, context=context)
