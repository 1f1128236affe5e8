"""Log-probabilities of given continuations through a compressed cache.

Axes: B batch · S new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.pool import PackedCache
from vlkv.compression.candidates import Plan
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.begin import compress_after, read_whole
from vlkv.generation.decode import check_new_room, check_room, decode_step
from vlkv.generation.nan import check_values
from vlkv.generation.prefill import read_and_fill
from vlkv.inputs import Inputs, single_key
from vlkv.policies.full import Full


def score(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    targets: Int[Array | np.ndarray, "B S"],
    policy: Policy | None = None,
    *,
    key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Float[Array, "B S"]:
    """Log-probability of each target token given the prompt and earlier targets, computed with the compressed cache.

    These are probabilities of the model: temperature and rules such as a repetition penalty do not matter here.

    With `compose(..., answer=m)`, the first m targets run on the full cache and observe, and then it is compressed.
    It has no gradient, because a cache is packed and read in loops whose lengths depend on the data: differentiate
    `vlkv.forward` instead, which has no cache.

    Args:
        params: the model.
        inputs: the prompts, as in `generate`.
        targets: continuations, padded on the right with -1; the result is 0 for padding.
        policy: None: the full cache.
        key: for policies that draw at random.
        kernels: as in `generate`.

    Raises:
        InputError: targets are not whole numbers, have another number of rows than the prompts, or are no ids of the
            vocabulary; prompt and targets exceed the model's limit; there are fewer than m + 2 targets; or logits are
            NaN. Under jit, the result of NaN logits and of targets beyond the vocabulary is NaN.
    """
    inputs, key, params = Inputs.of(inputs, params.config), single_key(key), _without_gradient(params)
    targets = _checked(targets, inputs, params.config.decoder.vocab_size)
    new_tokens = targets.shape[1]
    check_room(params.config, inputs, new_tokens)
    policy = Full() if policy is None else policy
    policy_key = None if key is None else jax.random.split(key)[0]  # the same cache as in `generate` with this key
    layers = params.decoder.full_layers
    plan = Plan.of(policy, inputs, policy_key, layers=layers, new_tokens=new_tokens, answer=new_tokens)
    if m := slots_of(policy).answer:
        prompt, full = read_whole(params, inputs, plan, kernels=kernels)
        first = targets[:, :m]
        scores = log_probabilities(params, full, prompt.logits, first)
        cache, logits = compress_after(params, prompt, full, plan, jnp.maximum(first, 0), first >= 0, key=policy_key)
        scores = jnp.concatenate([scores, log_probabilities(params, cache, logits, targets[:, m:])], axis=1)
    else:
        cache, logits = read_and_fill(params, inputs, plan, key=policy_key, kernels=kernels)
        scores = log_probabilities(params, cache, logits, targets)
    check_values(params, inputs, scores, targets)
    return scores


@jax.custom_jvp
def _without_gradient(params: Any) -> Any:
    """The parameters; raises InputError if a result is differentiated with respect to them."""
    return params


@_without_gradient.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise InputError(
        "score cannot be differentiated, because a cache is packed in loops that depend on the data: "
        "differentiate vlkv.forward, which has none"
    )


def _checked(targets: Any, inputs: Inputs, vocab: int) -> Int[Array, "B S"]:
    """The targets as an array; raises InputError as `score`."""
    targets, rows = jnp.asarray(targets), inputs.valid.shape[0]
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise InputError(f"targets are {targets.dtype}: give ids of tokens, which are whole numbers")
    if targets.ndim != 2 or targets.shape[0] != rows:
        raise InputError(f"targets have the shape {targets.shape}: give [{rows}, S], a row for each of the prompts")
    if not isinstance(targets, jax.core.Tracer) and targets.is_fully_addressable and targets.size:
        largest = int(np.max(np.asarray(targets)))  # numpy's, because jax would trace it under jit
        if largest >= vocab:
            raise InputError(f"target {largest} is not in the vocabulary, whose ids are 0 to {vocab - 1}")
    return targets


def log_probabilities(
    params: Model, cache: PackedCache, logits: Float[Array, "B vocab"], targets: Int[Array | np.ndarray, "B S"]
) -> Float[Array, "B S"]:
    """`score` from a prompt's cache and logits.

    Raises:
        InputError: the cache or the model has no room for S - 1 tokens. Under jit, where earlier new tokens are not
            counted, the result is NaN for targets beyond the capacity.
    """
    targets = jnp.asarray(targets)
    check_new_room(params.config, cache, targets.shape[1] - 1)  # the last target is not added to the cache

    def log_probability(logits: Array, target: Array) -> Array:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(target, 0)[:, None], axis=1)[:, 0]
        return jnp.where(target >= 0, chosen, 0.0)

    def step(cache: PackedCache, pair: tuple[Array, Array]) -> tuple[PackedCache, Array]:
        previous, target = pair
        cache, logits = decode_step(params, cache, jnp.maximum(previous, 0))
        return cache, log_probability(logits, target)

    _, rest = jax.lax.scan(step, cache, (targets[:, :-1].T, targets[:, 1:].T))
    return jnp.concatenate([log_probability(logits, targets[:, 0])[:, None], rest.T], axis=1)
