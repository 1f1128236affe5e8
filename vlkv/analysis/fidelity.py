"""How much a compressed cache differs from the full one: features, attention, next tokens, and memory.

`follow` decodes given tokens and records every layer. Attention is recorded per token, not per slot, so that traces of
different caches can be compared.

Axes: B batch · S tokens · L layers · D width · N query heads · K key heads · T prompt · E = T + capacity for new
tokens · _e entries of a decode state.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from vlkv.cache.decode_state import DecodeState, begin, packed
from vlkv.cache.pool import PackedCache
from vlkv.compression.policy import Policy
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.decode import check_room, decode, decode_step
from vlkv.generation.nan import check_values
from vlkv.generation.prefill import prefill
from vlkv.generation.prompt import Prompt
from vlkv.generation.sampling import Greedy
from vlkv.generation.step import feed_and_watch
from vlkv.inputs import Inputs, single_key
from vlkv.policies.full import Full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The measurements of every step."""

    logits: Float[Array, "*S B vocab"]  # after each given token
    hidden: Float[Array, "*S L B D"]  # after each layer
    mass: Float[Array, "*S L B E"]  # share of attention that each token receives, mean over heads (A-VL, Eq. 1)
    stored: Float[Array, "*S L B"]  # entries in memory, mean over key heads
    used: Float[Array, "*S L B"]  # entries attended to, mean over key heads


def follow(
    params: Model,
    prompt: Prompt,
    cache: PackedCache,
    tokens: Int[Array | np.ndarray, "B S"],
) -> Trace:
    """Decodes the given tokens one by one, as `decode_step` does, and records every layer.

    The cache of the prompt is from any policy, with capacity for the tokens. Padding, -1, is replaced by token 0.

    Raises:
        InputError: no layer has full attention, so there is nothing to record.
    """
    if not params.decoder.full_layers:
        raise InputError(
            "all layers of this model have a sliding window, so there is no attention to a cache to record"
        )
    states = _decode_states(prompt, cache)

    def step(cache: PackedCache, token: Int[Array, " B"]) -> tuple[PackedCache, Trace]:
        def record(i: int, state: DecodeState, mass: Array, x: Array) -> tuple[Array, ...]:
            by_token = _by_token(mass, _tokens(state, prompt.valid), prompt.valid.shape[1] + cache.new_tokens)
            return x[:, 0], by_token, *(jnp.mean(jnp.sum(m, axis=-1), axis=-1) for m in (state.stored, state.attended))

        embedded, positions = params.embed_text(token[:, None]), cache.next_position[:, None]
        cache, x, layers = feed_and_watch(params.decoder, cache, embedded.x, positions, record, embedded.added)
        hidden, mass, stored, used = (jnp.stack(column) for column in zip(*layers, strict=True))
        return dataclasses.replace(cache, next_position=cache.next_position + 1), Trace(
            logits=params.decoder.logits(x[:, 0]), hidden=hidden, mass=mass, stored=stored, used=used,
        )  # fmt: skip

    assert tokens.shape[0] == prompt.valid.shape[0]
    fed = jnp.maximum(jnp.asarray(tokens), 0).T
    return jax.lax.scan(step, dataclasses.replace(cache, decode_states=states), fed)[1]


def _decode_states(prompt: Prompt, cache: PackedCache) -> DecodeState:
    """The decode states of the cache. If its policy has none, one that only lists the entries of the cache."""
    if cache.decode_states is not None:
        return cache.decode_states

    most = prompt.valid.shape[1]

    def row_state(token: Any, slots: Any, is_vision: Any, valid: Any) -> DecodeState:
        kept = jnp.zeros((len(token), most), bool).at[jnp.arange(len(token))[:, None], token].max(token >= 0)
        state = begin(kept, {}, is_vision, valid, jnp.sum(valid), new_tokens=0)
        return packed(state, token, slots, new_tokens=cache.new_tokens, reuses=False)

    of_rows = jax.vmap(row_state)
    states: DecodeState = jax.lax.map(
        lambda i: of_rows(cache.entries(i, most), cache.extent[i], prompt.is_vision, prompt.valid),
        jnp.arange(len(cache.start)),
    )
    return states


def _tokens(state: DecodeState, valid: Bool[Array, "B T"]) -> Int[Array, "B K E"]:
    """The token of each entry: its index in the prompt, or T + n for the n-th new token."""
    length, count = valid.shape[1], jnp.sum(valid, axis=1)[:, None, None]
    order = jnp.argsort(~valid, axis=1, stable=True)[:, None]
    of_prompt = jnp.take_along_axis(order, jnp.minimum(state.place, length - 1), axis=2)
    return jnp.where(state.place < count, of_prompt, length + state.place - count)


def _by_token(mass: Float[Array, "B N _e"], tokens: Int[Array, "B K _e"], most: int) -> Float[Array, "B E"]:
    """Attention per token, mean over heads: first the prompt's tokens, then the new ones. E is `most`."""
    batch, heads, entries = mass.shape
    mass = jnp.sum(mass.reshape(batch, tokens.shape[1], -1, entries), axis=2) / heads
    return jnp.zeros((batch, most)).at[jnp.arange(batch)[:, None, None], tokens].add(mass, mode="drop")


def feature_error(full: Trace, compressed: Trace) -> Float[Array, "S L B"]:
    """Mean absolute difference of the hidden states after each layer (PrefixKV, Fig. 5).

    Both traces must be of the same tokens. We take the paper's "feature" to mean the output of a layer.
    """
    return jnp.mean(jnp.abs(full.hidden - compressed.hidden), axis=-1)


def agreement(logits: Float[Array, "S B vocab"], answer: Int[Array | np.ndarray, "B n"]) -> Float[Array, " B"]:
    """The share of the answer's tokens that are the most likely token, given the answer before them.

    The first token is not counted, because eviction does not affect it. An answer of one token gives 1. `logits` are of
    a `Trace` of the answer, which is padded with -1.
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
