"""The ids of all tokens of each row so far, which rules such as a repetition penalty read. Other caches have none.

They do not depend on what a policy keeps. A row of the array has its ids in order, then -1.

Axes: B batch · S capacity, the prompt's and that for new tokens · T tokens to be added.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def append(
    history: Int[Array, "B S"] | None, ids: Int[Array, "B T"], valid: Bool[Array, "B T"] | None = None
) -> Int[Array, "B S"] | None:
    """The history with further ids; `valid` is False for padding. None stays None."""
    if history is None:
        return None
    present = jnp.ones(ids.shape, bool) if valid is None else valid
    place = jnp.sum(history >= 0, axis=1, keepdims=True) + jnp.cumsum(present, axis=1) - 1
    place = jnp.where(present, place, history.shape[1])  # past the end, where nothing is written
    return history.at[jnp.arange(len(ids))[:, None], place].set(ids.astype(history.dtype), mode="drop")


def lengthened(history: Int[Array, "B S"] | None, more: int) -> Int[Array, "B S+more"] | None:
    """The history with capacity for `more` ids; less capacity if the number is negative. None stays None."""
    if history is None:
        return None
    padded = jnp.pad(history, ((0, 0), (0, max(more, 0))), constant_values=-1)
    return padded[:, : history.shape[1] + more]
