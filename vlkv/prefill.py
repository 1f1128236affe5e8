"""Prefill: the prompt through the model, then the policy's choice, then one packed cache.

`prefill` observes each layer as soon as it has run, and lets go of its queries. `read_prompt` and `fill_cache` are the
same in two halves, so that one reading of a prompt can be compressed in many ways.

Axes: B batch · T prompt · t tokens of one layer · L layers · N, K heads · H head dim · A position axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from pallas_kernels import Kernels
from vlkv.cache import PackedCache, check_new_tokens, pack, reuses_slots, segment_slots
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.inputs import Inputs
from vlkv.memory import Memory, begin, packed
from vlkv.observe import ordinal, tokens_at
from vlkv.parallel import by_row
from vlkv.policies.policy import Budget, Policy, with_budget
from vlkv.policies.selection import Observed, allocate_and_take, observe, require_fit, see, shortlist
from vlkv.reading import LayerPrompt, Prompt, read
from vlkv.sampling import Greedy


def prefill(
    params: Model,
    inputs: Inputs,
    policy: Policy,
    *,
    sampling: Greedy | None = None,
    new_tokens: int | Array | None = None,  # an array is refused below, with the remedy
    key: Key[Array, ""] | None = None,
    kernels: Kernels | None = None,
) -> tuple[PackedCache, Float[Array, "B vocab"]]:
    """Runs the prompt, lets the policy choose, and packs what stays.

    `jax.jit(prefill)` needs no static argument names if it is given `sampling`; with `new_tokens` that one is static.

    Args:
        params: the model.
        inputs: from the processor.
        policy: decides what stays.
        sampling: its `max_new_tokens` are the most tokens that may follow; None is `Greedy()`.
        new_tokens: the same as a number, instead of `sampling`.
        key: for policies that draw at random.
        kernels: implementations of the ops, for this and for decoding from the cache; None: of the platform.

    Returns:
        The cache, and the logits of the first new token, which see the whole prompt unless the policy shortens it.

    Raises:
        InputError: no key where the policy needs one, it does not fit the model, or new_tokens is less than 1; before
            anything is traced.
    """
    if isinstance(new_tokens, jax.Array):
        raise InputError(
            "new_tokens must be known to jit: give sampling=vlkv.Greedy(max_new_tokens=...) instead, or "
            'jax.jit(prefill, static_argnames="new_tokens")'
        )
    if new_tokens is None:
        new_tokens = (sampling or Greedy()).max_new_tokens
    assert not isinstance(new_tokens, jax.Array)
    check_new_tokens(new_tokens)
    require_fit(policy, len(params.decoder.layers), key)
    look = _observer(policy, inputs, layers=len(params.decoder.layers), key=key, kernels=kernels)
    prompt = read(params, inputs, policy, look, key=key, kernels=kernels)
    return _fill(prompt, policy, new_tokens), prompt.logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """What one layer brings to the choice, of one row: heads first, as a policy sees them."""

    k: Float[Array, "*B K t H"]
    v: Float[Array, "*B K t H"]
    is_vision: Bool[Array, "*B t"]
    stays: Bool[Array, "*B t"]  # may be kept
    source: Int[Array, "*B t"]  # which token of the prompt it is
    held: Int[Array, "*B"]  # tokens in scope
    observed: Observed


def _look(
    policy: Policy,
    read: LayerPrompt,
    key: Key[Array, ""] | None,
    *,
    layer: int,
    layers: int,
    max_instruction: int,
    keep: int | None,
    kernels: Kernels | None,
) -> Candidates:
    """Observes one layer of one row; under a cap only the `keep` tokens that may still be kept live on."""
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (read.q, read.k, read.v))
    obs = see(
        policy, q, k, v, read.is_vision, read.valid, key,
        layer=layer, layers=layers, max_instruction=max_instruction, stays=read.stays, lse=read.lse,
        grid=read.grid, kernels=kernels,
    )  # fmt: skip
    observed, held = observe(policy, obs), jnp.sum(obs.in_scope)
    if keep is None:
        return Candidates(k, v, read.is_vision, read.stays, read.source, held, observed)
    stays = (read.stays & ~obs.in_scope) | shortlist(policy, observed, obs, layers=layers)
    order = tokens_at(jnp.where(stays, ordinal(stays), keep), keep)
    stays, order = order >= 0, jnp.maximum(order, 0)
    values = {name: value[:, order] for name, value in observed.values.items()}
    observed = observed._replace(scores=observed.scores[:, order], protected=observed.protected[order], values=values)
    k, v = (x.at[:, order].get(mode="promise_in_bounds") for x in (k, v))
    return Candidates(k, v, read.is_vision[order], stays, read.source[order], held, observed)


def fill_cache(prompt: Prompt, policy: Policy, *, new_tokens: int, key: Key[Array, ""] | None = None) -> PackedCache:
    """What the policy keeps of a prompt, packed, with room for `new_tokens`.

    Raises:
        InputError: no key where the policy needs one, a prompt that another policy has shortened, or new_tokens is less
            than 1.
    """
    return fill_cache_with(prompt, policy, None, new_tokens=new_tokens, key=key)


def fill_cache_with(
    prompt: Prompt,
    policy: Policy,
    budget: Budget | None,
    *,
    new_tokens: int,
    key: Key[Array, ""] | None = None,
) -> PackedCache:
    """As `fill_cache`, with the budget as arrays, so that one program serves every keep.

    Args:
        prompt: that was read.
        policy: with the largest keep; memory is reserved for it.
        budget: of the same policy with a smaller keep. None: its own.
        new_tokens: slots of the tail.
        key: for policies that draw at random.

    Raises:
        InputError: as `fill_cache`.
    """
    check_new_tokens(new_tokens)
    require_fit(policy, len(prompt.layers), key)
    if policy.reducer != prompt.reducer:
        raise InputError(
            f"{type(policy).__name__} and the prompt do not fit: read_prompt must be given the same policy"
        )
    chooser = policy if budget is None else with_budget(policy, budget)
    look = _observer(chooser, prompt, layers=len(prompt.layers), key=key, kernels=prompt.kernels)
    found = tuple(look(i, layer) for i, layer in enumerate(prompt.layers))
    return _fill(dataclasses.replace(prompt, layers=found), policy, new_tokens, chooser)


def _observer(
    policy: Policy, bounds: Inputs | Prompt, *, layers: int, key: Key[Array, ""] | None, kernels: Kernels | None
) -> Callable[[int, LayerPrompt], Candidates]:
    """A function from a layer's number and what it read, all rows, to its candidates."""
    batch = bounds.valid.shape[0]
    keys = None if key is None else jax.random.split(key, batch)
    keep = None
    if policy.cap is not None:
        text = bounds.max_text
        count = bounds.max_vision + (text if policy.scope == "all" else 0)
        keep = int(policy.cap_counts(layers=layers, most=count)[-1]) + (text if policy.scope == "vision" else 0)

    def look(i: int, read: LayerPrompt) -> Candidates:
        fewer = None if keep is None else min(keep, read.valid.shape[1])
        one = partial(
            _look, policy, layer=i, layers=layers, max_instruction=bounds.max_instruction, keep=fewer, kernels=kernels
        )
        return by_row(one, batch)(read, keys)

    return look


def _fill(prompt: Prompt, policy: Policy, new_tokens: int, chooser: Policy | None = None) -> PackedCache:
    """From the candidates of all layers to a cache; `chooser` is the policy whose budgets count, if not `policy`."""
    length, found = prompt.valid.shape[1], prompt.layers
    longest = max(layer.stays.shape[1] for layer in found)
    is_vision, stays, source = (
        jnp.stack([_lengthen(getattr(layer, name), longest) for layer in found], axis=1)
        for name in ("is_vision", "stays", "source")
    )  # [B, L, T]
    held = jnp.stack([layer.held for layer in found], axis=1)
    seen = jnp.sum(prompt.valid & prompt.is_vision if policy.scope == "vision" else prompt.valid, axis=1)
    observed = tuple(layer.observed for layer in found)
    choose = partial(allocate_and_take, chooser or policy, bound=length)
    selection = jax.vmap(choose)(observed, is_vision, stays, held, seen)
    merged = []
    for i, layer in enumerate(found):
        kept, scores = (x[:, i, :, : layer.k.shape[2]] for x in (selection.kept, selection.scores))
        merged.append(jax.vmap(policy.merge)(layer.k, layer.v, kept, scores))
    kept, asked, reuses = jnp.swapaxes(selection.kept, 0, 1), None, reuses_slots(policy)
    memories: tuple[Memory, ...] = ()
    if policy.acts:
        recall = jax.vmap(partial(_recall, policy, new_tokens=new_tokens))
        recalled = [
            recall(
                layer.source, kept[i][..., : layer.k.shape[2]], layer.observed.values, prompt.is_vision, prompt.valid
            )
            for i, layer in enumerate(found)
        ]
        memories, kept = tuple(m for m, _ in recalled), jnp.stack([_lengthen(x, longest) for _, x in recalled])
        asked = jnp.stack([jax.vmap(policy.decode_slots)(m) for m in memories]) if reuses else None
    bounds = {"max_vision": prompt.max_vision, "max_text": prompt.max_text, "max_images": prompt.max_images}
    cache = pack(
        policy, tuple(m[0] for m in merged), tuple(m[1] for m in merged), kept,
        is_vision=jnp.swapaxes(is_vision, 0, 1), source=jnp.swapaxes(source, 0, 1),
        next_position=prompt.next_position, new_tokens=new_tokens, asked=asked, **bounds,
    )  # fmt: skip
    cache = dataclasses.replace(cache, kernels=prompt.kernels)
    if policy.acts:
        most = segment_slots(
            policy, layers=len(found), vision=prompt.max_vision, text=prompt.max_text, images=prompt.max_images,
            new_tokens=new_tokens,
        )  # fmt: skip
        moved = jax.vmap(partial(packed, new_tokens=new_tokens if reuses else cache.new_tokens, reuses=reuses))
        memories = tuple(moved(m, cache.entries(i, most), cache.length[i]) for i, m in enumerate(memories))
        cache = dataclasses.replace(cache, memory=memories, policy=policy)
    return _own_buffers(cache, prompt)


def _recall(
    policy: Policy,
    source: Int[Array, " t"],
    kept: Bool[Array, "K t"],
    values: dict[str, Float[Array, "K t"]],
    is_vision: Bool[Array, " T"],
    valid: Bool[Array, " T"],
    *,
    new_tokens: int,
) -> tuple[Memory, Bool[Array, "K t"]]:
    """What a policy that acts while decoding remembers of one layer of one row, and which tokens it stores."""

    def spread(x: Array) -> Array:  # from a layer's tokens to the prompt's
        return jnp.zeros((len(x), len(valid)), x.dtype).at[:, source].set(x)

    memory = begin(
        jnp.zeros((len(kept), len(valid)), bool).at[:, source].max(kept),
        {name: spread(value) for name, value in values.items()}, is_vision, valid, new_tokens=new_tokens,
    )  # fmt: skip
    memory = policy.begin(memory)
    return memory, kept & memory.stored[:, source]


def _own_buffers(cache: PackedCache, prompt: Prompt) -> PackedCache:
    """The cache without an array that it holds twice, or that the prompt holds too.

    A cache may be donated, and then no array may be donated twice or still be needed by the prompt.
    """
    seen = {id(x) for x in jax.tree.leaves(prompt)}

    def own(x: Array) -> Array:
        if id(x) in seen:
            return jnp.copy(x)
        seen.add(id(x))
        return x

    return jax.tree.map(own, cache)


def _lengthen(x: Array, length: int) -> Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, length - x.shape[-1])])
