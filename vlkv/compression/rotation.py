"""Rotations of queries, for methods that estimate future queries. Tables are those of `vlkv.decoder.rope`.

Unbatched. Axes: T tokens · X positions · A position axes · N query heads · H head dim.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.observe import LayerContext
from vlkv.decoder.rope import apply_rope, rope_table


def unrotated(q: Float[Array, "N T H"], context: LayerContext) -> Float[Array, "N T H"]:
    """Queries before rotation, in float32: a rotation is inverted by the opposite angle."""
    table = _table(context.positions, context, q.shape[-1]) / context.rope.scale**2
    cos, sin = jnp.split(table, 2, axis=-1)
    by_token, back = jnp.swapaxes(q.astype(jnp.float32), 0, 1), jnp.concatenate([cos, -sin], axis=-1)
    return jnp.swapaxes(apply_rope(by_token[None], back[None], neighbours=context.rope.neighbours)[0], 0, 1)


def mean_rotation(
    context: LayerContext, valid: Bool[Array, " T"], ahead: int | Int[Array, " X"], head_dim: int
) -> Float[Array, " _H"]:
    """The mean of the rotations of the `ahead` positions after the prompt, or those at these distances from the next
    position, for `rotated`."""
    axes, distances = context.positions.shape[1], jnp.arange(ahead) if isinstance(ahead, int) else ahead
    following = jnp.max(jnp.where(valid[:, None], context.positions, -1)) + 1 + distances
    every_axis = jnp.broadcast_to(following[:, None], (len(following), axes))
    return jnp.mean(_table(every_axis, context, head_dim), axis=(0, 1))


def rotated(x: Float[Array, "*batch H"], table: Float[Array, " _H"], context: LayerContext) -> Float[Array, "*batch H"]:
    """All vectors after the same rotation, or mean of rotations."""
    flat = x.reshape(1, -1, 1, x.shape[-1])
    return apply_rope(flat, table, neighbours=context.rope.neighbours).reshape(x.shape)


def _table(positions: Int[Array, "X A"], context: LayerContext, head_dim: int) -> Float[Array, "X 1 H"]:
    """`rope_table` of one row."""
    limit = None if context.limit is None else context.limit[None]
    return rope_table(positions[None], head_dim, context.rope, limit)[0]
