"""Frames of videos, for methods that compare them. Unbatched. Axes: T tokens.

A frame is a view of `Tokens.grid`, a group of patches with lines and columns of their own. The grid does not say which
views belong to one video: an image, and a tile of an image in some families, are views too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from vlkv.compression.tokens import Tokens
from vlkv.masks import ordinal, tokens_at


def patches(tokens: Tokens) -> Bool[Array, " T"]:
    """Vision tokens with a place in a frame; others, such as newlines, have none."""
    return tokens.valid & tokens.is_vision & (tokens.grid[:, 1] >= 0)


def sum_by_frame(x: Num[Array, "T ..."], tokens: Tokens) -> Num[Array, "T ..."]:
    """The sum of `x` over the patches of each frame; the first axis is the number of the frame."""
    length = len(x)
    return jax.ops.segment_sum(x, jnp.where(patches(tokens), tokens.grid[:, 0], length), length + 1)[:length]


def one_frame_before(tokens: Tokens) -> Int[Array, " T"]:
    """The index of the same patch one frame before; -1: none, because the frame before has other lines or columns."""
    patch, length = patches(tokens), len(tokens.valid)
    frame = jnp.where(patch, tokens.grid[:, 0], length)
    last = jax.ops.segment_max(tokens.grid[:, 1:], frame, length + 1)  # line and column
    size = sum_by_frame(patch.astype(jnp.int32), tokens)[tokens.grid[:, 0]]
    follows = patch & (frame > 0) & jnp.all(last[frame] == last[frame - 1], axis=1)
    place = ordinal(patch)  # patches of a frame are in raster order
    at = tokens_at(jnp.where(patch, place, length), length)
    return jnp.where(follows, at[jnp.maximum(place - size, 0)], -1)
