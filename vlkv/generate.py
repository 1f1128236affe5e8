"""The seams after prefill: each public, each pure, each jittable.

    forward      whole prompts, no cache                       parity and training
    decode_step  one token more                                (`extend`, many more: vlkv/extend.py)
    decode       tokens until every row has ended              the loop
    generate     prefill and decode in one jit                 the main job
    score        log-probabilities of a given continuation     perplexity through the compressed cache
    stream       `generate`, handing out tokens as they come; from a cache `decode_steps`

Axes: B batch · T prompt · L layers · N, K heads · H head dim · S new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from vlkv.cache import PackedCache, most_used
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.feeding import feed
from vlkv.inputs import Inputs
from vlkv.policies.full import Full
from vlkv.policies.policy import Policy, require_policy
from vlkv.prefill import prefill
from vlkv.sampling import Greedy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """An answer, and what the cache kept for it."""

    tokens: Int[Array, "B S"]  # after a row's end: its last token again; -1 if it has none
    lengths: Int[Array, " B"]  # tokens of each row, the stop id included; fewer if its logits became NaN
    token: Int[Array, "B P K"]  # prompt token in each pool slot, see PackedCache
    start: Int[Array, "L B K"]
    length: Int[Array, "L B K"]  # prompt entries that were kept
    cache_bytes: int = dataclasses.field(metadata={"static": True})  # as allocated, all rows: see PackedCache.bytes
    slots: int = dataclasses.field(metadata={"static": True})  # allocated for each row and key head, tails included
    parts: int = dataclasses.field(default=1, metadata={"static": True})  # of the slots, see PackedCache


def forward(params: Model, inputs: Inputs) -> Float[Array, "B T vocab"]:
    """Logits of every position, without a cache."""
    return params.decoder.logits(params.decoder(params.embed(inputs), inputs.positions, inputs.valid))


def decode_step(
    params: Model, cache: PackedCache, token: Int[Array, " B"]
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Feeds one token per row; returns the cache with it and the logits of the next. The cache may be donated.

    Raises:
        InputError: the cache has no room for it, where that is known (under jit it is not: the row's logits are NaN).
    """
    check_new_room(cache, 1)
    cache, x = feed(params.decoder, cache, params.decoder.embedding(token)[:, None], cache.next_position[:, None])
    return dataclasses.replace(cache, next_position=cache.next_position + 1), logits_after(params, cache, x[:, 0])


def logits_after(params: Model, cache: PackedCache, x: Float[Array, "B D"]) -> Float[Array, "B vocab"]:
    """Logits from the last layer's output; NaN in rows that were fed more tokens than the cache was made for."""
    full = cache.used > cache.new_tokens
    return jnp.where(full[:, None], jnp.nan, params.decoder.logits(x))


class _Decoding(NamedTuple):
    """The state of the loop: `step` tokens of every row are written."""

    step: Int[Array, ""]
    cache: PackedCache
    tokens: Int[Array, "B S"]
    ended: Bool[Array, " B"]
    lengths: Int[Array, " B"]


def generate(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    *,
    policy: Policy | None = None,
    sampling: Greedy | None = None,
    key: Key[Array, ""] | None = None,
    kernels: Kernels | None = None,
) -> Output:
    """Answers every row of a batch from a compressed cache.

    It is compiled when it is first called with a policy, a sampling and inputs of some shape. `jax.jit(generate)` works
    too and needs no static argument names.

    Args:
        params: the model.
        inputs: from the processor of `load`, or (outside jit) from the family's transformers processor. Batches with
            the same shapes and bounds share one trace.
        policy: None keeps the full cache.
        sampling: None is `Greedy()`: the likeliest token, at most 64 of them.
        key: for random policies and for `Sample`.
        kernels: implementations of the ops (`pallas_kernels.Kernels`); they change the speed, not the answer.

    Raises:
        InputError: a key is needed and missing, or the answer would pass the model's limit (see `check_room`).
    """
    inputs = Inputs.of(inputs, params.config)
    policy = Full() if policy is None else policy
    sampling = Greedy() if sampling is None else sampling
    require_policy(policy)
    check_room(params.config, inputs, sampling.max_new_tokens)
    sampling.require_key(key)
    return _generate(params, inputs, policy, sampling, key, kernels)


@jax.jit
def _generate(
    params: Model,
    inputs: Inputs,
    policy: Policy,
    sampling: Greedy,
    key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> Output:
    policy_key, sample_key = (None, None) if key is None else jax.random.split(key)
    cache, logits = prefill(params, inputs, policy, new_tokens=sampling.max_new_tokens, key=policy_key, kernels=kernels)
    tokens, lengths = decode(params, cache, logits, sampling=sampling, key=sample_key)
    return Output(
        tokens=tokens, lengths=lengths, token=cache.token, start=cache.start, length=cache.counts,
        cache_bytes=cache.bytes, slots=cache.slots, parts=cache.parts,
    )  # fmt: skip


def decode(
    params: Model,
    cache: PackedCache,
    logits: Float[Array, "B vocab"],
    *,
    sampling: Greedy,
    key: Key[Array, ""] | None = None,
) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
    """One `while_loop` from a prompt's cache and logits until every row has ended.

    A row also ends where its next logits are NaN, as they are if `extend` has left less room than the answer needs: no
    token is made of them.

    Returns:
        Tokens, and how many each row has, the stop id included. After its end a row repeats its last token, or -1 if it
        has none.

    Raises:
        InputError: the cache has too little room for `max_new_tokens`; tokens fed before count where their number is
            known (under jit it is not).
    """
    check_new_room(cache, sampling.max_new_tokens - 1)  # the last token is not fed
    stop = jnp.asarray(params.config.stop if sampling.stop is None else sampling.stop, jnp.int32)

    def pick(logits: Array, step: Array | int) -> Array:
        return sampling.choose(logits, None if key is None else jax.random.fold_in(key, step))

    def append(state: _Decoding, logits: Array) -> _Decoding:
        token, ended = pick(logits, state.step), state.ended | _without_token(logits)
        tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, axis=1)
        return _Decoding(state.step + 1, state.cache, tokens, ended | jnp.isin(token, stop), state.lengths + ~ended)

    def unfinished(state: _Decoding) -> Array:
        return (state.step < sampling.max_new_tokens) & ~jnp.all(state.ended)

    def step(state: _Decoding) -> _Decoding:
        previous = jax.lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1, keepdims=False)
        cache, logits = decode_step(params, state.cache, previous)
        return append(state._replace(cache=cache), logits)

    batch = logits.shape[0]
    blank = jnp.zeros((batch, sampling.max_new_tokens), jnp.int32)
    state = _Decoding(jnp.int32(0), cache, blank, jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32))
    state = jax.lax.while_loop(unfinished, step, append(state, logits))
    place = jnp.arange(sampling.max_new_tokens)
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)
    last = jnp.where(state.lengths[:, None] > 0, last, -1)
    return jnp.where(place < state.lengths[:, None], state.tokens, last), state.lengths


def _without_token(logits: Float[Array, "B vocab"]) -> Bool[Array, " B"]:
    """Which rows have no next token, because their logits are NaN."""
    return jnp.any(jnp.isnan(logits), axis=-1)


def score(
    params: Model,
    inputs: Inputs,
    targets: Int[Array | np.ndarray, "B S"],
    policy: Policy | None = None,
    *,
    key: Key[Array, ""] | None = None,
    kernels: Kernels | None = None,
) -> Float[Array, "B S"]:
    """Log-probability of each target token given the prompt and the targets before it, through the compressed cache.

    Args:
        params: the model.
        inputs: the prompts.
        targets: continuations, padded on the right with -1; padding scores 0.
        policy: None keeps the full cache.
        key: for policies that draw at random.
        kernels: as in `generate`.
    """
    targets = jnp.asarray(targets)
    new_tokens = targets.shape[1]
    check_room(params.config, inputs, new_tokens)
    policy = Full() if policy is None else policy
    policy_key = None if key is None else jax.random.split(key)[0]  # as in `generate`: the same draw, the same cache
    cache, logits = prefill(params, inputs, policy, new_tokens=new_tokens, key=policy_key, kernels=kernels)
    return log_probabilities(params, cache, logits, targets)


def log_probabilities(
    params: Model, cache: PackedCache, logits: Float[Array, "B vocab"], targets: Int[Array | np.ndarray, "B S"]
) -> Float[Array, "B S"]:
    """What `score` returns, from a prompt's cache and logits.

    Raises:
        InputError: the cache has no room for S - 1 tokens. If tokens have been fed and that is unknown (under jit),
            targets without room score NaN.
    """
    targets = jnp.asarray(targets)
    check_new_room(cache, targets.shape[1] - 1)  # the last target is not fed

    def log_probability(logits: Array, target: Array) -> Array:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(target, 0)[:, None], axis=1)[:, 0]
        return jnp.where(target >= 0, chosen, 0.0)

    def step(cache: PackedCache, pair: tuple[Array, Array]) -> tuple[PackedCache, Array]:
        previous, target = pair
        cache, logits = decode_step(params, cache, jnp.maximum(previous, 0))
        return cache, log_probability(logits, target)

    _, rest = jax.lax.scan(step, cache, (targets[:, :-1].T, targets[:, 1:].T))
    return jnp.concatenate([log_probability(logits, targets[:, 0])[:, None], rest.T], axis=1)


_prefill = jax.jit(prefill)
_decode_step = jax.jit(decode_step, donate_argnames="cache")


def stream(
    params: Model,
    inputs: Inputs,
    *,
    policy: Policy | None = None,
    sampling: Greedy | None = None,
    key: Key[Array, ""] | None = None,
    kernels: Kernels | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """As `generate`, but yields each step's tokens as they come; rows that have ended repeat their stop id."""
    policy = Full() if policy is None else policy
    sampling = Greedy() if sampling is None else sampling
    require_policy(policy)
    check_room(params.config, inputs, sampling.max_new_tokens)
    sampling.require_key(key)
    policy_key, sample_key = (None, None) if key is None else jax.random.split(key)
    cache, logits = _prefill(params, inputs, policy, sampling=sampling, key=policy_key, kernels=kernels)
    yield from decode_steps(params, cache, logits, sampling=sampling, key=sample_key)


def decode_steps(
    params: Model,
    cache: PackedCache,
    logits: Float[Array, "B vocab"],
    *,
    sampling: Greedy,
    key: Key[Array, ""] | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """As `decode`, but yields each step's tokens as they come; the cache is donated.

    Rows that have ended repeat their stop id, and are -1 if they have no token.
    """
    stop = params.config.stop if sampling.stop is None else sampling.stop
    ended, shown = np.zeros(logits.shape[0], bool), np.full(logits.shape[0], -1, np.int32)
    for i in range(sampling.max_new_tokens):
        token = sampling.choose(logits, None if key is None else jax.random.fold_in(key, i))
        ended |= np.asarray(_without_token(logits))
        shown = np.where(ended, shown, np.asarray(token))
        yield shown
        ended |= np.isin(shown, stop)
        if ended.all() or i + 1 == sampling.max_new_tokens:
            return
        cache, logits = _decode_step(params, cache, jnp.asarray(shown))


def check_new_room(cache: PackedCache, new_tokens: int) -> None:
    """Raises InputError if a cache cannot take so many tokens more. Under jit it counts none as fed."""
    most, used = cache.new_tokens, most_used(cache) or 0
    if used + new_tokens > most:
        raise InputError(
            f"the cache has room for {most} new tokens, {used} of them used, and {new_tokens} more are needed: prefill "
            f"with a larger new_tokens, or vlkv.cache.resize(cache, {used + new_tokens})"
        )


def check_room(config: ModelConfig, inputs: Inputs, new_tokens: int) -> None:
    """Raises InputError if prompt and answer together pass the model's positions.

    Under jit the length of a prompt is unknown and only `new_tokens` is checked; the command line asks before.
    """
    limit = config.decoder.max_positions
    if new_tokens >= limit:
        raise InputError(
            f"max_new_tokens={new_tokens} leaves no room for a prompt: the model's limit is {limit} positions"
        )
    if isinstance(inputs.valid, np.ndarray):  # under trace the counts are unknown
        longest = int(inputs.valid.sum(axis=1).max())
        if longest + new_tokens > limit:
            raise InputError(
                f"a prompt of {longest} tokens and {new_tokens} new ones pass the model's limit of {limit}"
            )
