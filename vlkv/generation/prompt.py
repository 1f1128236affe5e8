"""The first half of prefill: runs all layers over a prompt, which some policies reduce between layers.

Axes: B batch · T tokens of the prompt · t tokens of one layer · N query heads · K key heads · H head dim ·
A position axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.rings import Rings
from vlkv.compression.checking import require_fit, require_policy
from vlkv.compression.filling import Prompt
from vlkv.compression.observe import fields_of
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.decoder.rope import position_limit
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.reading import Each, Prefill, stages_of
from vlkv.generation.sampling import Greedy, begin_history
from vlkv.inputs import Inputs, single_key
from vlkv.masks import end_of


def read_prompt(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    policy: Policy | None = None,
    *,
    observers: Sequence[Policy] = (),
    sampling: Greedy | None = None,
    new_tokens: int | Int[Array, ""] = 64,
    key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Prompt:
    """Runs all layers over a prompt. The result contains the queries, keys and values of all layers.

    Under one jit with `fill_cache`, XLA does not keep what the policy does not use.

    Args:
        params: the model.
        inputs: from the processor, or (outside jit) from the family's transformers processor.
        policy: necessary only if it reduces or repeats the prompt, or uses norms (`needs_own_prompt`).
        observers: policies that will be given to `fill_cache`. What they measure (`Stages.measures`) is then measured
            by the attention of the layers, if a backend can do that, and not again for each of them.
        sampling: its rules may read the ids of the prompt, which the result then has; None: `Greedy()`.
        new_tokens: largest capacity for new tokens of the caches that will be made of the prompt. It matters only for
            models with long-RoPE (see `vlkv.decoder.rope.position_limit`).
        key: for policies that reduce the prompt at random.
        kernels: implementations of the ops, also for functions that use the result; None: those of the platform.

    Raises:
        InputError: the policy does not fit the model, needs a key or a vision tower, or, outside jit, keeps more tokens
            than its `remaining` allows.
    """
    inputs, key = Inputs.of(inputs, params.config), single_key(key)
    if policy is not None:
        require_fit(policy, params.decoder.full_layers, key)
    if not isinstance(observers, Sequence) or isinstance(observers, str):
        raise InputError(f"observers={observers!r} must be a sequence of policies, such as (policy,)")
    for observer in observers:
        require_policy(observer)
    options: dict[str, Any] = {"sampling": sampling, "new_tokens": new_tokens, "key": key, "kernels": kernels}
    return read_layers(params, inputs, policy, lambda _, layer: layer, observers=observers, stacked=True, **options)


def read_layers(
    params: Model,
    inputs: Inputs,
    policy: Policy | None,
    each: Each,
    *,
    observers: Sequence[Policy] = (),
    sampling: Greedy | None = None,
    new_tokens: int | Int[Array, ""] = 64,
    key: Key[Array, ""] | None = None,
    kernels: Kernels | None = None,
    stacked: bool = False,
) -> Prompt:
    """Like `read_prompt`, but keeps only what `each` returns for a layer; it is called before the next layer runs.

    With `stacked`, the result may have `StackedLayers` in place of a tuple. Then the layers run in one loop, which is
    compiled once, and `each` gets the layer's number as an array.

    Layers with a sliding window have a ring instead of such a result, layers with a recurrence have a state, and layers
    that use keys and values of earlier ones have nothing; `each` and the reducer do not count them.

    If the policy's reducer has `drops_early_layers`, `each` is called for the layers before the last reduction only
    after this reduction, and gets only the tokens that are left.
    """
    inputs = jax.tree.map(jnp.asarray, inputs)
    reducer = None if policy is None else slots_of(policy).reduce
    stages = () if reducer is None or inputs.max_vision == 0 else stages_of(reducer, params.decoder)
    history = begin_history(params.config, inputs, sampling)
    end = end_of(inputs.positions, inputs.valid)
    prefill = Prefill(
        params=params,
        inputs=inputs,
        policy=policy,
        observers=observers if policy is None else (policy, *observers),
        each=each,
        kernels=kernels or Kernels(),
        key=key,
        stages=stages,
        limit=position_limit(end + new_tokens, params.decoder.rope),
        number=jnp.cumsum(inputs.valid, axis=1) - 1,
    )
    carry = prefill.run(stacked=stacked)
    tokens, rings = carry.tokens, carry.rings
    # The next position counts all tokens of the prompt, minus the positions lost if a reduction renumbered them.
    position, renumbered = inputs.positions[jnp.arange(len(end)), tokens.source[:, 0]], tokens.positions[:, 0]
    positions_lost = jnp.max(position, axis=-1) - jnp.max(renumbered, axis=-1)
    return Prompt(
        **fields_of(inputs, "is_vision", "valid", "bounds"),
        layers=carry.results,
        next_position=jnp.broadcast_to((end - positions_lost)[:, None], renumbered.shape),
        logits=params.decoder.logits(tokens.x[:, 0]),
        reducer=reducer,
        kernels=prefill.kernels,
        heads=params.config.decoder.heads,
        rope=params.decoder.rope,
        position_limit=prefill.limit,
        rings=Rings(layers=rings, first_new=prefill.number[:, -1] + 1, new_tokens=0) if rings else None,
        states=carry.states,
        history=history,
    )


def forward(params: Model, inputs: Inputs | Mapping[str, Any]) -> Float[Array, "B T vocab"]:
    """Logits at every token of the prompts, without a cache. `inputs` are those of `generate`."""
    arrays: Inputs = jax.tree.map(jnp.asarray, Inputs.of(inputs, params.config))
    embedded = params.embed(arrays)
    until = params.decoder.until(arrays.is_vision)
    return params.decoder.logits(params.decoder(embedded.x, arrays.positions, arrays.valid, embedded.added, until))
