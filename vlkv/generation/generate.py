"""Answers prompts with a compressed cache: `generate` all tokens at once, `stream` token by token.

Axes: B batch · T prompt · L layers · K key heads · S new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.pool import PackedCache
from vlkv.cache.stored import StoredTokens
from vlkv.compression.candidates import Plan
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.begin import Begun, begin
from vlkv.generation.decode import check_room, decode_in, decode_steps
from vlkv.generation.nan import check_tokens, explain
from vlkv.generation.sampling import Greedy
from vlkv.inputs import Inputs, single_key
from vlkv.policies.full import Full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Generated tokens, and what the cache stores and allocates."""

    tokens: Int[Array, "B S"]  # -1: the logits are NaN, which ends the row; a row that has ended repeats its last token
    lengths: Int[Array, " B"]  # number of tokens of each row, including the stop token or -1
    cache_bytes: int = dataclasses.field(metadata={"static": True})  # allocated bytes of all rows (PackedCache.bytes)
    slots: int = dataclasses.field(metadata={"static": True})  # per row and key head, in pool, tails and rings
    # Number of tokens of the answer before the cache was compressed (`compose(answer=)`), or of the row if it is
    # shorter; 0: it was compressed after prefill.
    compressed_after: int = dataclasses.field(default=0, metadata={"static": True})
    # Allocated bytes of the full cache until then; None: it never existed.
    bytes_before: int | None = dataclasses.field(default=None, metadata={"static": True})
    _stored: StoredTokens

    @cached_property
    def kept(self) -> Bool[np.ndarray, "L B K T"]:
        """Which prompt tokens each layer and key head keeps after prefill, on the axis T of `Inputs.tokens`.

        L counts the layers with full attention. Layers with a sliding window keep the newest tokens under any policy.

        False: padding, tokens that a reduction has removed before this layer, and tokens that are evicted or merged
        into others. The token into which they are merged is kept. A method that evicts while decoding begins with these
        tokens and keeps fewer in the end.

        Raises:
            InputError: within jit, or if other hosts have some of the rows (`vlkv.sharding.gather(output).kept`).
        """
        return self._stored.mask()


def generate(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    *,
    policy: Policy | None = None,
    sampling: Greedy | None = None,
    key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Output:
    """Answers all prompts of a batch: prefill, compression of the cache, and decoding.

    It compiles two programs for each shape of the inputs: prefill for each policy, and decoding for each kind of cache,
    which policies share. It waits for the answer, because it raises an error if logits were NaN. `jax.jit(generate)`
    works too, needs no static argument names, and is one program. It cannot raise this error: the token of NaN logits
    is -1, which `processor.decode` refuses.

    Args:
        params: the model.
        inputs: from the processor of `load`, or (outside jit) from the family's transformers processor. Batches with
            the same shapes and bounds share one compiled program.
        policy: None: the full cache.
        sampling: None: `Greedy()`, the most likely token of every step, at most 64 tokens.
        key: for random policies, which get `jax.random.split(key)[0]`, and for `Sample`.
        kernels: implementations of the ops (`pallas_kernels.Kernels`), which affect only the speed.

    Raises:
        InputError: the policy does not fit the model, a key is missing, prompt and answer exceed the model's limit (see
            `check_room`), the answer would end before the cache is compressed, or logits are NaN.
    """
    inputs, plan, sampling, key = _planned(params, inputs, policy, sampling, key)
    policy_key, sample_key = (None, None) if key is None else jax.random.split(key)
    begun, stored = _begin(params, inputs, plan, sampling, policy_key, sample_key, kernels)
    size, slots = begun.cache.bytes, begun.cache.slots
    tokens, lengths, _ = _decode(params, begun.cache, begun.logits, sampling, sample_key, begun.tokens)
    check_tokens(params, inputs, tokens)
    return Output(
        tokens=tokens,
        lengths=lengths,
        cache_bytes=size,
        slots=slots,
        compressed_after=slots_of(plan.policy).answer,
        bytes_before=begun.bytes_before,
        _stored=stored,
    )


def _planned(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    policy: Policy | None,
    sampling: Greedy | None,
    key: PRNGKeyArray | None,
) -> tuple[Inputs, Plan, Greedy, PRNGKeyArray | None]:
    """Fills in the defaults of `generate` and makes all its checks, so that errors are raised before it compiles."""
    inputs, key = Inputs.of(inputs, params.config), single_key(key)
    sampling = Greedy() if sampling is None else sampling
    new_tokens, layers = sampling.max_new_tokens, params.decoder.full_layers
    sampling.require_key(key)
    check_room(params.config, inputs, new_tokens)
    policy = Full() if policy is None else policy
    plan = Plan.of(policy, inputs, key, layers=layers, new_tokens=new_tokens, answer=new_tokens)
    return inputs, plan, sampling, key


@jax.jit
def _begin(
    params: Model,
    inputs: Inputs,
    plan: Plan,
    sampling: Greedy,
    key: Key[Array, ""] | None,
    sample_key: Key[Array, ""] | None,
    kernels: Kernels | None,
) -> tuple[Begun, StoredTokens]:
    begun = begin(params, inputs, plan, sampling=sampling, key=key, sample_key=sample_key, kernels=kernels)
    # Copies, because decoding writes into the arrays of the cache.
    return begun, jax.tree.map(jnp.copy, StoredTokens.of(begun.cache, inputs.tokens.shape[1]))


@partial(jax.jit, donate_argnames="cache")
def _decode(
    params: Model,
    cache: PackedCache,
    logits: Float[Array, "B vocab"],
    sampling: Greedy,
    key: Key[Array, ""] | None,
    begun: Int[Array, "B m"] | None,
) -> tuple[Int[Array, "B S"], Int[Array, " B"], PackedCache]:
    return decode_in(params, cache, logits, sampling=sampling, key=key, begun=begun)


def stream(
    params: Model,
    inputs: Inputs | Mapping[str, Any],
    *,
    policy: Policy | None = None,
    sampling: Greedy | None = None,
    key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Generates like `generate`, and yields the tokens of each step. Rows that have ended repeat their stop token.

    With `compose(..., answer=m)`, the first m steps are computed before the first of them is yielded.

    Raises:
        InputError: as `generate`.
    """
    inputs, plan, sampling, key = _planned(params, inputs, policy, sampling, key)
    policy_key, sample_key = (None, None) if key is None else jax.random.split(key)
    begun = jitted.begin(
        params, inputs, plan, sampling=sampling, key=policy_key, sample_key=sample_key, kernels=kernels
    )
    answer = []
    for tokens in decode_steps(
        params, begun.cache, begun.logits, sampling=sampling, key=sample_key, begun=begun.tokens
    ):
        answer.append(tokens)
        if (tokens < 0).any():
            raise explain(params, inputs, tokens < 0, np.stack(answer, axis=1))
        yield tokens
