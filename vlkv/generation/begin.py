"""The beginning of an answer: prefill, and with `compose(..., answer=m)`, m tokens decoded with the full cache.

The policy observes these m tokens too: their queries follow those of the prompt. Then the entries of the prompt are
compressed, and the entries of the m tokens are written to the tail. Until then, memory holds the full cache and the
queries, keys and values of all layers.

Axes: B batch · T tokens of the prompt · m tokens of the answer · A position axes.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pallas_kernels import Kernels
from vlkv.cache.pool import PackedCache
from vlkv.compression.candidates import Plan
from vlkv.compression.filling import Prompt, fill
from vlkv.compression.observe import Layer, LayerRun, fields_of
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.families import Model
from vlkv.generation.decode import decode, logits_after
from vlkv.generation.prefill import read_and_fill
from vlkv.generation.prompt import read_layers
from vlkv.generation.reading import context_of
from vlkv.generation.rules import add_ids
from vlkv.generation.sampling import Greedy
from vlkv.generation.step import NewEntries, append, feed_and_read
from vlkv.inputs import Inputs
from vlkv.policies.full import Full

Ids = Int[Array, "B m"]
Mask = Bool[Array, "B m"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """A compressed cache, and the beginning of the answer that it contains."""

    cache: PackedCache
    logits: Float[Array, "B vocab"]  # of the next token
    tokens: Int[Array, "B m"] | None = None  # first m of the answer; None: the cache contains only the prompt
    bytes_before: int | None = dataclasses.field(default=None, metadata={"static": True})  # of the full cache, if any


def begin(
    params: Model,
    inputs: Inputs,
    plan: Plan,
    *,
    sampling: Greedy,
    key: PRNGKeyArray | None = None,
    sample_key: PRNGKeyArray | None = None,
    kernels: Kernels | None = None,
) -> Begun:
    """Runs prefill, decodes the first tokens with `compose(answer=)`, and compresses the cache. Call it under jit.

    `plan` has checked the policy. `key` is for policies that draw at random, `sample_key` for `Sample`.
    """
    count = slots_of(plan.policy).answer
    if not count:
        cache, logits = read_and_fill(params, inputs, plan, sampling=sampling, key=key, kernels=kernels)
        return Begun(cache=cache, logits=logits)
    prompt, full = read_whole(params, inputs, plan, sampling=sampling, kernels=kernels)
    first_steps = dataclasses.replace(sampling.filled(params.config), max_new_tokens=count)
    assert first_steps.rules is not None
    # This rule forces the last token of the whole answer, not the last one of these steps.
    rules = dataclasses.replace(first_steps.rules, forced_eos_token_id=())
    first_steps = dataclasses.replace(first_steps, rules=rules)
    tokens, lengths = decode(params, full, prompt.logits, sampling=first_steps, key=sample_key)
    valid = jnp.arange(count) < lengths[:, None]  # a row that has ended repeats its last token
    # -1 (NaN logits) is no id that can be embedded. `decode` gets the original tokens and ends the row.
    cache, logits = compress_after(params, prompt, full, plan, jnp.maximum(tokens, 0), valid, key=key)
    return Begun(cache=cache, logits=logits, tokens=tokens, bytes_before=full.bytes)


def read_whole(
    params: Model, inputs: Inputs, plan: Plan, *, sampling: Greedy | None = None, kernels: Kernels | None
) -> tuple[Prompt, PackedCache]:
    """Runs all layers over the prompt; returns their queries, keys and values, and the full cache."""
    prompt = read_layers(
        params, inputs, None, lambda _, layer: layer, sampling=sampling, new_tokens=plan.new_tokens, kernels=kernels
    )
    return prompt, fill(dataclasses.replace(plan, policy=Full()), prompt, None)


def compress_after(
    params: Model, prompt: Prompt, full: PackedCache, plan: Plan, tokens: Ids, valid: Mask, *, key: PRNGKeyArray | None
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Compresses the cache of a prompt; the first tokens of the answer observe too, and are added to it.

    `prompt` and `full` are from `read_whole`. `valid` is False after the end of an answer. Returns the cache and the
    logits of the next token.
    """
    observed, new = _read_answer(params, prompt, full, plan.policy, tokens, valid)
    cache = fill(plan, observed, key)
    cache = append(cache, new, valid)
    return dataclasses.replace(cache, history=add_ids(cache.history, tokens, valid)), observed.logits


def _read_answer(
    params: Model, prompt: Prompt, full: PackedCache, policy: Policy, tokens: Ids, valid: Mask
) -> tuple[Prompt, tuple[NewEntries, ...]]:
    """Adds the answer's tokens to the layers of the prompt as observers that cannot be kept; returns their entries too.

    They pass through the full cache a second time, all together, because `decode` returns no queries.
    """
    embedded, steps = params.embed_text(tokens), jnp.arange(tokens.shape[1])
    positions = full.next_position[:, None] + steps[:, None]  # [B, m, A]
    full_after, x, new = feed_and_read(params.decoder, full, embedded.x, positions, valid, embedded.added)
    count = jnp.sum(valid, axis=1)
    full_after = dataclasses.replace(full_after, next_position=full.next_position + count[:, None])
    full_layers = [i for i, kind in enumerate(params.decoder.kinds) if kind.is_counted]
    layers = tuple(
        _extended(params, policy, i, layer, entries, positions, valid, limit=prompt.position_limit)
        for i, layer, entries in zip(full_layers, prompt.layers, new, strict=True)
    )
    logits = logits_after(params, full_after, x[jnp.arange(len(count)), count - 1])
    of_cache = fields_of(full_after, "next_position", "rings", "states")
    return dataclasses.replace(prompt, layers=layers, logits=logits, **of_cache), new


def _extended(
    params: Model,
    policy: Policy,
    i: int,
    layer: Layer,
    new: NewEntries,
    positions: Int[Array, "B m A"],
    valid: Mask,
    *,
    limit: Int[Array, " B"] | None,
) -> Layer:
    """Layer i of the prompt, and the answer's tokens, in each row right after its last valid token."""
    length, count, context, bounds = layer.valid.shape[1], valid.shape[1], layer.context, layer.run.bounds
    assert context is not None and bounds is not None
    end = jnp.max(jnp.where(layer.valid, jnp.arange(1, length + 1), 0), axis=1)  # [B]

    def join(x: Array, added: Array | int, axis: int = 1) -> Array:
        """Writes `added` at `end` of each row. So padding stays behind all valid tokens, and `until` stays an index."""
        longer = jnp.pad(x, [(0, count if dim == axis else 0) for dim in range(x.ndim)])
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        write = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1))
        return write(longer, jnp.broadcast_to(added, shape).astype(x.dtype), end)

    place, until = jnp.arange(length + count), layer.until
    if until is not None:  # a token of the answer attends to itself and to earlier tokens
        until = jnp.where(place < end[:, None], join(until, 0), place)
    qkv = {name: join(getattr(layer, name), jnp.swapaxes(getattr(new, name), 1, 2), axis=2) for name in "qkv"}
    added: dict[str, Any] = {"valid": valid, "is_vision": 0, "grid": -1}
    masks = {name: join(getattr(layer, name), x) for name, x in added.items()}
    bounds = dataclasses.replace(bounds, text=bounds.text + count, instruction=bounds.instruction + count)
    is_candidate, source = join(layer.is_candidate, 0), join(layer.source, 0)
    run = LayerRun(is_candidate=is_candidate, source=source, until=until, kernels=layer.kernels, bounds=bounds)
    positions = join(context.positions, positions)
    context = context_of(params, policy, i, positions, jnp.swapaxes(qkv["v"], 1, 2), limit=limit)
    return Layer(**qkv, **masks, context=context, run=run)
