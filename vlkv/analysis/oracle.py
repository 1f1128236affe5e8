"""The oracle baseline: a cache that keeps the tokens that the answer needs.

Axes: B batch · L layers · K key heads · T prompt tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from vlkv.cache.history import lengthened
from vlkv.cache.packing import pack
from vlkv.cache.pool import PackedCache, checked_new_tokens
from vlkv.cache.rings import resize
from vlkv.compression.sizes import Budget, budget_of, cache_spec
from vlkv.generation.decode import check_rotation
from vlkv.generation.prompt import Prompt
from vlkv.keys import required_key
from vlkv.masks import top
from vlkv.policies.random import ImgRandom


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
