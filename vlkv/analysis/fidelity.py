"""How much a compressed cache differs from the full one: features, next tokens, and memory.

Axes: B batch · S tokens · L layers · D width · P policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from vlkv.analysis.trace import Trace
from vlkv.cache.pool import PackedCache
from vlkv.compression.policy import Policy
from vlkv.families import Model
from vlkv.generation.decode import check_room, decode, decode_step
from vlkv.generation.nan import check_values
from vlkv.generation.prefill import prefill
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs
from vlkv.keys import single_key
from vlkv.policies.full import Full


def feature_error(full: Trace, compressed: Trace) -> Float[Array, "S L B"]:
    """Mean absolute difference of the hidden states after each layer (PrefixKV, Fig. 5).

    Both traces must be of the same tokens. We take the paper's "feature" to mean the output of a layer.
    """
    return jnp.mean(jnp.abs(full.hidden - compressed.hidden), axis=-1)


def agreement(logits: Float[Array, "S B vocab"], answer: Int[Array | np.ndarray, "B n"]) -> Float[Array, " B"]:
    """The share of the answer's tokens that are the most likely token, given the answer before them.

    The first token is not counted, because eviction does not affect it. An answer of one token gives 1.

    Args:
        logits: `logits` of a `Trace` of the answer.
        answer: padded with -1.
    """
    target = jnp.asarray(answer)[:, 1 : logits.shape[0] + 1].T
    counts = target >= 0
    right = jnp.sum(counts & (jnp.argmax(logits[: len(target)], axis=-1) == target), axis=0)
    return jnp.where(jnp.any(counts, axis=0), right / jnp.maximum(jnp.sum(counts, axis=0), 1), 1.0)


def log_probability(logits: Float[Array, "S B vocab"], answer: Int[Array | np.ndarray, "B n"]) -> Float[Array, " B"]:
    """Mean log-probability of the answer's tokens after the first; 0 for an answer of one token. See `agreement`."""
    target = jnp.asarray(answer)[:, 1 : logits.shape[0] + 1].T
    all_p = jax.nn.log_softmax(logits[: len(target)])
    p = jnp.take_along_axis(all_p, jnp.maximum(target, 0)[..., None], axis=-1)[..., 0]
    return jnp.sum(jnp.where(target >= 0, p, 0.0), axis=0) / jnp.maximum(jnp.sum(target >= 0, axis=0), 1)


def answer_of(
    params: Model, cache: PackedCache, logits: Float[Array, "B vocab"], *, sampling: Greedy
) -> Int[Array, "B S"]:
    """The answer decoded from this cache, with -1 after the end of each row."""
    tokens, lengths = decode(params, cache, logits, sampling=sampling)
    return jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)


def kl_to_full(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    policy: Policy,
    *,
    sampling: Greedy | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, " B"]:
    """How much a policy changes the model's predictions: the mean KL(full cache || compressed cache) in nats.

    The mean is over the tokens of the greedy answer of the full cache; both caches are given these tokens. 0 means that
    the policy changes nothing.

    Args:
        params: the model.
        inputs: from the processor.
        policy: the policy to measure.
        sampling: its `max_new_tokens` limits the answer; None: `Greedy()`.
        key: for random policies.

    Raises:
        InputError: prompt and answer exceed the model's limit, a key is missing, or logits are NaN. Under jit, the
            result of a row with NaN logits is NaN.
    """
    inputs, key, sampling = Inputs.of(inputs, params.config), single_key(key), sampling or Greedy()
    check_room(params.config, inputs, sampling.max_new_tokens)
    answer, full = _full_answer(params, inputs, sampling)
    policy_key = None if key is None else jax.random.split(key)[0]  # the same key as in `generate`
    divergence: Array = _divergence(params, inputs, policy, sampling, answer, full, policy_key)
    check_values(params, inputs, divergence, answer)
    return divergence


@jax.jit
def _full_answer(params: Model, inputs: Inputs, sampling: Greedy) -> tuple[Array, Array]:
    cache, logits = prefill(params, inputs, Full(), sampling=sampling)
    greedy = Greedy(max_new_tokens=sampling.max_new_tokens, stop=sampling.stop, rules=sampling.rules)
    tokens, lengths = decode(params, cache, logits, sampling=greedy)
    answer = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], tokens, -1)
    full = _log_softmax(params, cache, logits, answer)
    return answer, jnp.where(jnp.any(tokens < 0, axis=1)[None, :, None], jnp.nan, full)


@jax.jit
def _divergence(
    params: Model, inputs: Inputs, policy: Policy, sampling: Greedy, answer: Array, full: Array, key: Any
) -> Float[Array, " B"]:
    cache, logits = prefill(params, inputs, policy, sampling=sampling, key=key)
    compressed = _log_softmax(params, cache, logits, answer)
    divergence = jnp.sum(jnp.exp(full) * (full - compressed), axis=-1)  # [S, B]
    counts = (answer >= 0).T
    return jnp.sum(jnp.where(counts, divergence, 0.0), axis=0) / jnp.sum(counts, axis=0)  # NaN without any token


def _log_softmax(
    params: Model, cache: PackedCache, logits: Float[Array, "B vocab"], answer: Int[Array, "B S"]
) -> Float[Array, "S B vocab"]:
    """Log-probabilities of all tokens of the vocabulary at each token of the answer, given the answer before it."""

    def step(cache: PackedCache, token: Array) -> tuple[PackedCache, Array]:
        return decode_step(params, cache, jnp.maximum(token, 0))

    rest = jax.lax.scan(step, cache, answer[:, :-1].T)[1]
    return jax.nn.log_softmax(jnp.concatenate([logits[None], rest]).astype(jnp.float32))
