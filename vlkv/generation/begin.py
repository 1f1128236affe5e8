"""The beginning of an answer: prefill, and with `compose(..., answer=m)`, its first m tokens with the full cache.

These tokens are observers too: their queries follow those of the prompt in what a policy observes. Then the entries of
the prompt are compressed; those of the tokens are in the tail. The full cache exists until then, and the queries, keys
and values of all layers, so the peak of memory is that of `read_prompt` and a full cache.

Axes: B batch · T tokens of the prompt · m tokens of the answer · A position axes.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache import history
from vlkv.cache.pool import PackedCache
from vlkv.compression.checking import require_fit
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.families import Model
from vlkv.generation.decode import decode, logits_after
from vlkv.generation.layer_prompt import LayerPrompt, context_of
from vlkv.generation.prefill import fill, read_and_fill
from vlkv.generation.prompt import Prompt, read_prompt
from vlkv.generation.sampling import Greedy
from vlkv.generation.step import NewEntries, append, feed_and_read
from vlkv.inputs import Inputs
from vlkv.policies.full import Full


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A compressed cache, and the beginning of the answer that it contains."""

    cache: PackedCache
    logits: Float[Array, "B vocab"]  # of the next token
    tokens: Int[Array, "B m"] | None = None  # as `decode` returns them; None: the cache contains only the prompt
    bytes_before: int | None = dataclasses.field(default=None, metadata={"static": True})  # of the full cache, if any


def begin(
    params: Model,
    inputs: Inputs,
    policy: Policy,
    *,
    sampling: Greedy,
    new_tokens: int,
    key: PRNGKeyArray | None = None,
    sample_key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Begun:
    """Prefill, decoding of the first `Slots.answer` tokens, and compression. Call it under jit.

    Args:
        params: the model.
        inputs: the prompts.
        policy: selects the entries.
        sampling: chooses the tokens, as in `decode`.
        new_tokens: capacity for new tokens.
        key: for policies that draw at random.
        sample_key: for `Sample`.
        kernels: implementations of the ops.

    Raises:
        InputError: the policy does not fit the model, or the answer would end before the cache is compressed.
    """
    require_fit(policy, params.decoder.full_layers, key, max_new_tokens=sampling.max_new_tokens)
    if not slots_of(policy).answer:
        cache, logits = read_and_fill(params, inputs, policy, new_tokens, sampling=sampling, key=key, kernels=kernels)
        return Begun(cache=cache, logits=logits)
    prompt, full = read_whole(params, inputs, sampling=sampling, new_tokens=new_tokens, kernels=kernels)
    first = dataclasses.replace(sampling.filled(params.config), max_new_tokens=slots_of(policy).answer)
    assert first.rules is not None
    rules = dataclasses.replace(first.rules, forced_eos_token_id=())  # which is the last token of the whole answer
    first = dataclasses.replace(first, rules=rules)
    tokens, lengths = decode(params, full, prompt.logits, sampling=first, key=sample_key)
    valid = jnp.arange(slots_of(policy).answer) < lengths[:, None]  # a row that has ended repeats its last token
    cache, logits = compress_after(
        params, prompt, full, policy, jnp.maximum(tokens, 0), valid, new_tokens=new_tokens, key=key
    )
    return Begun(cache=cache, logits=logits, tokens=tokens, bytes_before=full.bytes)


def read_whole(
    params: Model, inputs: Inputs, *, sampling: Greedy | None = None, new_tokens: int, kernels: Kernels | None
) -> tuple[Prompt, PackedCache]:
    """The prompt after all layers, and the full cache of it."""
    prompt = read_prompt(params, inputs, sampling=sampling, new_tokens=new_tokens, kernels=kernels)
    return prompt, fill(prompt, Full(), None, new_tokens, None)


def compress_after(
    params: Model,
    prompt: Prompt,
    full: PackedCache,
    policy: Policy,
    tokens: Int[Array, "B m"],
    valid: Bool[Array, "B m"],
    *,
    new_tokens: int,
    key: PRNGKeyArray | None,
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """The compressed cache with the first tokens of an answer, which observe; and the logits of the next token.

    Args:
        params: the model.
        prompt: from `read_whole`.
        full: likewise.
        policy: selects the entries of the prompt.
        tokens: the tokens.
        valid: False after the end of an answer.
        new_tokens: as in `read_whole`.
        key: for policies that draw at random.
    """
    after, new = _read_answer(params, prompt, full, policy, tokens, valid)
    cache = append(fill(after, policy, None, new_tokens, key), new, valid)
    return dataclasses.replace(cache, history=history.append(cache.history, tokens, valid)), after.logits


def _read_answer(
    params: Model,
    prompt: Prompt,
    full: PackedCache,
    policy: Policy,
    tokens: Int[Array, "B m"],
    valid: Bool[Array, "B m"],
) -> tuple[Prompt, tuple[NewEntries, ...]]:
    """The prompt with the answer's tokens as further observers, which are no candidates; and their entries."""
    embedded, steps = params.embed_text(tokens), jnp.arange(tokens.shape[1])
    positions = full.next_position[:, None] + steps[:, None]  # [B, m, A]
    fed, x, new = feed_and_read(params.decoder, full, embedded.x, positions, valid, embedded.added)
    count = jnp.sum(valid, axis=1)
    fed = dataclasses.replace(fed, next_position=full.next_position + count[:, None])
    counted = [i for i, kind in enumerate(params.decoder.kinds) if kind.is_counted]
    layers = tuple(
        _extended(params, policy, i, layer, entries, positions, valid, limit=prompt.position_limit)
        for i, layer, entries in zip(counted, prompt.layers, new, strict=True)
    )
    after = dataclasses.replace(
        prompt, layers=layers, logits=logits_after(params, fed, x[jnp.arange(len(count)), count - 1]),
        next_position=fed.next_position, rings=fed.rings, states=fed.states,
        max_instruction=prompt.max_instruction + tokens.shape[1],
    )  # fmt: skip
    return after, new


def _extended(
    params: Model,
    policy: Policy,
    i: int,
    layer: LayerPrompt,
    new: NewEntries,
    positions: Int[Array, "B m A"],
    valid: Bool[Array, "B m"],
    *,
    limit: Int[Array, " B"] | None,
) -> LayerPrompt:
    """Layer i of the prompt, followed by the answer's tokens. Each row goes on directly after its last valid token."""
    length, more, context = layer.valid.shape[1], valid.shape[1], layer.context
    assert context is not None
    end = jnp.max(jnp.where(layer.valid, jnp.arange(1, length + 1), 0), axis=1)  # [B]
    write = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))

    def join(x: Array, added: Array | int) -> Array:
        longer = jnp.pad(x, [(0, 0), (0, more)] + [(0, 0)] * (x.ndim - 2))
        return write(longer, jnp.broadcast_to(added, (len(x), more, *x.shape[2:])).astype(x.dtype), end)

    place, until = jnp.arange(length + more), layer.until
    if until is not None:
        until = jnp.where(place < end[:, None], join(until, 0), place)
    v = join(layer.v, new.v)
    return LayerPrompt(
        q=join(layer.q, new.q), k=join(layer.k, new.k), v=v, valid=join(layer.valid, valid),
        is_vision=join(layer.is_vision, 0), is_candidate=join(layer.is_candidate, 0), source=join(layer.source, 0),
        grid=join(layer.grid, -1), until=until,
        context=context_of(params, policy, i, join(context.positions, positions), v, limit=limit),
    )  # fmt: skip
