"""Frames of videos, for methods that compare them. Unbatched. Axes: T tokens.

A view is a group of patches of `Tokens.grid` with lines and columns of their own: a frame of a video, an image, or a
tile of an image in some families. `Tokens.frame` says which views are the frames of one video. Every other view is
treated as a video of one frame.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

from vlkv.compression.tokens import Tokens
from vlkv.masks import ordinal, tokens_at


def patches(tokens: Tokens) -> Bool[Array, " T"]:
    """Vision tokens with a place in a view; others, such as newlines, have none."""
    return tokens.valid & tokens.is_vision & (tokens.grid[:, 1] >= 0)


def videos(tokens: Tokens) -> Int[Array, " T"]:
    """The number of the first view of each token's video; 0 for text."""
    return jnp.maximum(tokens.grid[:, 0] - (0 if tokens.frame is None else jnp.maximum(tokens.frame, 0)), 0)


def sum_by(number: Int[Array, " T"], x: Num[Array, "T ..."], tokens: Tokens) -> Num[Array, "T ..."]:
    """The sum of `x` over all patches with the same number; the first axis of the result is this number."""
    length = len(x)
    return jax.ops.segment_sum(x, jnp.where(patches(tokens), number, length), length + 1)[:length]


def one_frame_before(tokens: Tokens) -> Int[Array, " T"]:
    """The index of the same patch one frame before; -1: none, in the first frame of a video and in an image."""
    patch, length = patches(tokens), len(tokens.valid)
    if tokens.frame is None:
        return jnp.full(length, -1)
    place = ordinal(patch)  # patches of a frame are in raster order
    size = sum_by(tokens.grid[:, 0], patch.astype(jnp.int32), tokens)[tokens.grid[:, 0]]
    at = tokens_at(jnp.where(patch, place, length), length)[jnp.maximum(place - size, 0)]
    same = jnp.all(tokens.grid[at] == tokens.grid - jnp.array([1, 0, 0]), axis=1)
    return jnp.where(patch & same & (tokens.frame > 0) & (tokens.frame[at] == tokens.frame - 1), at, -1)
