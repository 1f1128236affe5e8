"""Letting go at a fixed distance while decoding, shared by PrefixKV and Elastic Cache.

Unbatched. Axes: K key heads · E entries.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from vlkv.memory import Memory, evict
from vlkv.policies.policy import Policy


def evict_at_distance(memory: Memory, distance: int, *, capacity: Int[Array, " K"], moving: bool = True) -> Memory:
    """Lets one entry go where a layer holds more than its share of what has been seen, which stays that of the prompt.

    Over ceil(capacity / prompt x seen) the `distance`-th newest entry leaves, or the middle one where there are no
    more entries than that.

    Args:
        memory: after the step's attention, its own entry included.
        distance: 1 is the newest entry.
        capacity: entries that the prompt was granted.
        moving: False counts the distance from the end of the prompt's entries, as the published codes do: then the
            entry at rank capacity - distance by age leaves at every step.
    """
    share = share_of_seen(capacity, memory, memory.steps)
    if memory.reuses:
        share = jnp.minimum(share, memory.slots - 1)
    count = jnp.sum(memory.stored, axis=-1)
    end = count if moving else capacity
    leaving = jnp.where(end > distance, end - distance, end // 2)
    over = memory.stored & (memory.rank == leaving[:, None]) & (count > share)[:, None]
    return evict(memory, over, memory.rank.astype(jnp.float32))


def share_of_seen(capacity: Int[Array, " K"], memory: Memory, new: Int[Array, ""] | int) -> Int[Array, " K"]:
    """ceil(capacity / prompt x seen) after so many new tokens."""
    prompt = jnp.maximum(memory.vision + memory.text, 1)
    return capacity - (-(capacity * new) // prompt)  # without a product that passes 32 bits


def share_bounds(
    policy: Policy, kept: int, longest: int, *, layers: int, most: int, new_tokens: int, slack: bool = False
) -> tuple[int, int]:
    """`Policy.decode_bounds` of a method whose share of all tokens seen stays that of the prompt.

    Prompts of fewer tokens than 1 / keep, of which every layer keeps one, are granted no more than longer ones.

    Args:
        policy: the method.
        kept: of the prompt.
        longest: of the prompt.
        layers: L.
        most: the most tokens of a prompt.
        new_tokens: the most tokens that may follow.
        slack: whether prefill may keep up to L - 1 entries more than asked.
    """
    seen = np.arange(max(1, min(most, 0 if policy.keep is None else math.ceil(1 / policy.keep))), most + 1)
    total = policy.totals(layers=layers, most=most)[seen].astype(np.int64)
    total = np.minimum(total + slack * (layers - 1), layers * seen)
    one = -(-total // layers)
    more = int(np.max(total + total * new_tokens // seen) - total[-1])
    longer = int(np.max(one - (-one * new_tokens // seen)) - one[-1]) if longest < most else new_tokens
    return kept + more + 2 * layers, longest + longer + 1
