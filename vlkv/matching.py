"""Which tokens are alike, and folding one into the other, while a prompt is read.

Unbatched: a row of T tokens of which some give themselves away (A) and some take (B). A token belongs to a group, any
integer, and is matched within it: a window of an image, or one group for all. Tokens stay at their places, and no
T x T matrix is built. Axes: T tokens · D width · H width of what is compared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK_ELEMENTS = 2**22  # similarities held at a time, of one row of the batch


def rank_within(group: Int[Array, " T"], key: Float[Array, " T"] | Int[Array, " T"] | None = None) -> Int[Array, " T"]:
    """Each token's place in its group by a rising key, counting from 0; ties, and all without a key: by place."""
    order = jnp.argsort(group, stable=True) if key is None else jnp.lexsort((key, group))
    ordered, place = group[order], jnp.arange(group.shape[0])
    starts = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    first = jax.lax.cummax(jnp.where(starts, place, 0))
    return jnp.zeros_like(place).at[order].set(place - first)


def largest_within(group: Int[Array, " T"], value: Int[Array, " T"]) -> Int[Array, " T"]:
    """The largest of a value in each token's group."""
    order = jnp.lexsort((-value, group))
    rank = rank_within(group)
    first = rank_within(group, -value) == 0
    del order, rank
    return first  # type: ignore[return-value]
