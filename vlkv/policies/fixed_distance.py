"""Letting go at a fixed distance while decoding, shared by PrefixKV and Elastic Cache.

Unbatched. Axes: K key heads · E entries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from vlkv.memory import Memory, evict, rank_by_place


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
    prompt = memory.vision + memory.text
    # capacity x seen / prompt, without a product that passes 32 bits.
    share = capacity - (-(capacity * memory.steps) // jnp.maximum(prompt, 1))
    count = jnp.sum(memory.stored, axis=-1)
    end = count if moving else capacity
    leaving = jnp.where(end > distance, end - distance, end // 2)
    rank = rank_by_place(memory, memory.stored)
    over = memory.stored & (rank == leaving[:, None]) & (count > share)[:, None]
    return evict(memory, over, rank.astype(jnp.float32))
