"""Eviction at a fixed distance from the newest entry while decoding, for PrefixKV and Elastic Cache.

Unbatched. Axes: K key heads · E entries.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from vlkv.cache.decode_state import DecodeState, evict
from vlkv.compression.policy import Policy


def evict_at_distance(
    state: DecodeState, distance: int, *, budget: Int[Array, " K"], moving: bool = True
) -> DecodeState:
    """Evicts one entry of each head that has too many, so that the compression ratio stays that of the prompt.

    A head has too many if there are more than ceil(budget / prompt x tokens so far) entries, or if no slot is left for
    the next one. The `distance`-th newest entry is evicted, or the middle one if there are at most `distance` entries.

    Args:
        state: after the attention of the step, with the new entry.
        distance: 1 is the newest entry.
        budget: entries that prefill kept.
        moving: False: count back from the last prompt entry, as the published codes do. Then the entry whose rank by
            age is budget - distance is evicted at every step.
    """
    allowed = allowed_entries(budget, state, state.steps)
    if state.reuses:
        allowed = jnp.minimum(allowed, state.slots - 1)
    count = jnp.sum(state.stored, axis=-1)
    end = count if moving else budget
    leaving = jnp.where(end > distance, end - distance, end // 2)
    over = state.stored & (state.rank == leaving[:, None]) & (count > allowed)[:, None]
    return evict(state, over, state.rank.astype(jnp.float32))


def allowed_entries(budget: Int[Array, " K"], state: DecodeState, new: Int[Array, ""] | int) -> Int[Array, " K"]:
    """ceil(budget / prompt x tokens so far) after `new` new tokens."""
    prompt = jnp.maximum(state.vision + state.text, 1)
    return budget - (-(budget * new) // prompt)  # in this form, no product exceeds 32 bits


def share_bounds(
    policy: Policy, kept: int, longest: int, *, layers: int, most: int, new_tokens: int
) -> tuple[int, int]:
    """`decode_bounds` of a method that keeps the same share of all tokens as of the prompt.

    Prompts of fewer than 1 / keep tokens, of which every layer keeps one, get no more slots than longer ones.

    Args:
        policy: the method.
        kept: as in `decode_bounds`.
        longest: as in `decode_bounds`.
        layers: L.
        most: bound on the tokens of a prompt.
        new_tokens: bound on the tokens that follow.
    """
    seen = np.arange(max(1, min(most, 0 if policy.keep is None else math.ceil(1 / policy.keep))), most + 1)
    total = np.asarray(policy.total(layers * seen, layers=layers, text=most), np.int64)
    one = -(-total // layers)
    more = int(np.max(total + total * new_tokens // seen) - total[-1])
    longer = int(np.max(one - (-one * new_tokens // seen)) - one[-1]) if longest < most else new_tokens
    return kept + more + 2 * layers, longest + longer + 1
