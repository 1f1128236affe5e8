"""Which tokens of a prompt a policy or an oracle keeps, which remain in each layer, and which patches they are.

Axes: B batch · L layers · K key heads · T prompt · h, w rows and columns of patches.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from vlkv.cache.packing import pack
from vlkv.cache.pool import PackedCache, checked_new_tokens
from vlkv.cache.resizing import lengthened
from vlkv.cache.rings import resize
from vlkv.compression.candidates import select
from vlkv.compression.checking import require_fit, require_layers
from vlkv.compression.observe import Observation
from vlkv.compression.policy import Policy
from vlkv.compression.selection import Selection
from vlkv.compression.sizes import Budget, budget_of, cache_spec
from vlkv.compression.slots import slots_of
from vlkv.compression.tokens import Tokens
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.decode import check_rotation
from vlkv.generation.prompt import Prompt, read_layers
from vlkv.inputs import Inputs, required_key, single_key
from vlkv.masks import top
from vlkv.policies.lightkv import LightKV
from vlkv.policies.random import ImgRandom


def choose(prompt: Prompt, policy: Policy, *, key: PRNGKeyArray | None = None) -> Selection:
    """`policies.select` for every row of a prompt: kept entries, budgets, scores, and the method's own `extra` arrays.

    In `extra`, AirCache returns strength and skewness (Eqs. 9, 10; Fig. 3), PrefixKV the cumulative priority, and CSP
    the self and cross scores.

    Raises:
        InputError: the policy reduces the prompt, so that layers have different tokens; or a key is missing.
    """
    if prompt.reducer is not None or slots_of(policy).reduce is not None:
        name = type(prompt.reducer or slots_of(policy).reduce).__name__
        raise InputError(f"{name} shortens the prompt and ranks no entries: see analysis.reached")
    key = single_key(key)
    require_fit(policy, len(prompt.layers), key)
    keys = None if key is None else jax.random.split(key, prompt.valid.shape[0])
    q, k, v = (jnp.stack([getattr(layer, name) for layer in prompt.layers], axis=1) for name in "qkv")
    context = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *(layer.context for layer in prompt.layers))
    same, of_row = prompt.layers[0], partial(select, policy)  # grid and until are the same in all layers
    return jax.vmap(of_row)(q, k, v, prompt.is_vision, prompt.valid, keys, same.grid, context, same.until)


def reached(prompt: Prompt) -> Bool[Array, "B L T"]:
    """Which prompt tokens each layer processed. A policy that shortens the prompt removes some (LightKV, Fig. 7)."""
    batch, length = prompt.valid.shape
    row = jnp.arange(batch)[:, None]
    blank = jnp.zeros((batch, length), bool)
    return jnp.stack([blank.at[row, r.source].max(r.valid) for r in prompt.layers], axis=1)


def held(cache: PackedCache, length: int) -> Float[Array, "B L T"]:
    """For each layer and each of the prompt's `length` tokens, the share of key heads that keep it after prefill."""
    return jnp.mean(held_by_head(cache, length), axis=2)


def held_by_head(cache: PackedCache, length: int) -> Bool[Array, "B L K T"]:
    """Which of the prompt's `length` tokens each layer and key head keeps after prefill."""
    layers, batch, heads = cache.start.shape
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]

    def layer(i: int) -> Bool[Array, "B K T"]:
        token = cache.entries(i, length)
        where = jnp.where(token >= 0, token, length)  # out of bounds, so not written
        return jnp.zeros((batch, heads, length), bool).at[row, head, where].set(True, mode="drop")

    return jnp.stack([layer(i) for i in range(layers)], axis=1)


def evidence_recall(cache: PackedCache, evidence: Bool[Array, "B T"]) -> Float[Array, "B L K"]:
    """The share of the tokens that the answer needs, at least one per row, in the cache of each layer and key head."""
    kept = held_by_head(cache, evidence.shape[1]) & evidence[:, None, None]
    return jnp.sum(kept, axis=-1) / jnp.sum(evidence, axis=-1)[:, None, None]


def on_grid(values: Shaped[np.ndarray, "*L T"], grid: Int[np.ndarray, "T 3"]) -> list[Float[np.ndarray, "*L h w"]]:
    """Arranges numbers of the tokens of one row as maps of patches, one per image; NaN where a patch has no token.

    `grid` is `Inputs.grid` of the row.
    """
    values, grid = np.asarray(values, np.float32), np.asarray(grid)
    pictures = []
    for image in range(int(grid[:, 0].max(initial=-1)) + 1):
        patches = (grid[:, 0] == image) & (grid[:, 1:] >= 0).all(axis=1)
        picture = np.full((*values.shape[:-1], *(grid[patches, 1:].max(axis=0, initial=-1) + 1)), np.nan, np.float32)
        picture[..., grid[patches, 1], grid[patches, 2]] = values[..., patches]
        pictures.append(picture)
    return pictures


def merged_into(params: Model, inputs: Inputs | Mapping[str, Any], method: Policy) -> Int[np.ndarray, "stages T"]:
    """For each stage of LightKV and each prompt token, the index of the token that it has been merged into by then.

    A token that is not merged has its own index (LightKV, Fig. 7).

    Raises:
        InputError: another method, several questions, or too few layers with full attention.
    """
    if not isinstance(method, LightKV):
        raise InputError(f"{type(method).__name__} does not merge patches in stages: give LightKV")
    inputs = Inputs.of(inputs, params.config)
    require_layers(method, params.decoder.full_layers)
    if inputs.tokens.shape[0] != 1:
        raise InputError(f"inputs contain {inputs.tokens.shape[0]} questions: give only one")
    if not inputs.max_vision:
        raise InputError("the prompt has no vision tokens to merge: give an image")
    stages: dict[int, tuple[np.ndarray, ...]] = {}

    def record(stage: int, *arrays: Any) -> None:
        stages[int(stage)] = tuple(map(np.asarray, arrays))

    class Recorded(LightKV):
        """The same method; it also records the pairs that it merges."""

        def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
            jax.debug.callback(record, stage, *self.pairs(tokens, stage), tokens.source)
            return super().reduce(tokens, obs, stage=stage)

    recorded = Recorded(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})
    run = jax.jit(lambda p, i: read_layers(p, i, recorded, lambda *_: None).logits)
    jax.block_until_ready(run(params, inputs))
    jax.effects_barrier()
    owner, owners = np.arange(inputs.tokens.shape[1]), []
    for stage in sorted(stages):
        target, merged, source = stages[stage]
        into = np.arange(len(owner))
        into[source[merged]] = source[target[merged]]  # all other tokens keep their own index
        owner = into[owner]
        owners.append(owner)
    return np.stack(owners)


def oracle_cache(
    prompt: Prompt,
    evidence: Bool[Array, "B T"],
    policy: ImgRandom,
    budget: Budget | None = None,
    *,
    new_tokens: int,
    key: PRNGKeyArray,
) -> PackedCache:
    """Keeps the evidence in every layer and head, random vision tokens up to the budget, and all text.

    A method with the same budget that answers worse loses quality by its choice of tokens. If there is more evidence
    than the budget, a random part of it is kept.

    Args:
        prompt: a prompt that was not reduced.
        evidence: the vision tokens that the answer needs.
        policy: determines how many vision tokens are kept, unless `budget` does, as in `fill_cache_with`.
        budget: None: that of `policy`.
        new_tokens: slots of the tail.
        key: for the random tokens.
    """
    key, new_tokens = required_key(key), checked_new_tokens(new_tokens)
    check_rotation(prompt, new_tokens)
    layers, (batch, length) = len(prompt.layers), prompt.valid.shape
    heads = prompt.layers[0].k.shape[1]
    if budget is None:
        budget = budget_of(policy, layers=layers, most=length, text=prompt.bounds.text)
    vision = prompt.valid & prompt.is_vision
    total = jnp.asarray(budget.nominal)[jnp.sum(vision, axis=1)]
    share = total[:, None] // layers + (jnp.arange(layers) < total[:, None] % layers)  # [B, L]
    scores = jax.random.uniform(key, (batch, layers, heads, length)) + 2.0 * evidence[:, None, None]

    def choose(scores, share, vision, valid):  # [L, K, T], [L], [T], [T] of one row
        count = jnp.broadcast_to(share[:, None], (layers, heads))
        return jax.vmap(top, (0, None, 0))(scores, vision, count) | (valid & ~vision)

    kept = jax.vmap(choose)(scores, share, vision, prompt.valid)
    everywhere = (layers, batch, length)
    spec = cache_spec(policy, layers=layers, new_tokens=new_tokens, **prompt.bounds.sizes)
    cache = pack(
        spec, tuple(layer.k for layer in prompt.layers), tuple(layer.v for layer in prompt.layers),
        jnp.swapaxes(kept, 0, 1),
        is_vision=jnp.broadcast_to(prompt.is_vision, everywhere),
        source=jnp.broadcast_to(jnp.arange(length), everywhere), next_position=prompt.next_position,
    )  # fmt: skip
    rings = None if prompt.rings is None else resize(prompt.rings, new_tokens)
    return dataclasses.replace(cache, position_limit=prompt.position_limit, kernels=prompt.kernels, rings=rings,
                               states=prompt.states, history=lengthened(prompt.history, cache.new_tokens))  # fmt: skip
