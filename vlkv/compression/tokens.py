"""The tokens between two layers of prefill, and their reduction.

Axes: B batch · T tokens · D width · A position axes · S first layers of the decoder · W blocks of the tower whose
attention is used · N its heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from vlkv.compression.observe import fields_of
from vlkv.inputs import Inputs
from vlkv.masks import ordinal, tokens_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Hidden states and what is known about each token. A policy's `reduce` gets one row, without B."""

    x: Float[Array, "*B T D"]
    positions: Int[Array, "*B T A"]
    is_vision: Bool[Array, "*B T"]
    valid: Bool[Array, "*B T"]
    source: Int[Array, "*B T"]  # index of the token in the prompt
    size: Float[Array, "*B T"]  # number of prompt tokens that it represents after merging
    grid: Int[Array, "*B T 3"]  # (image number in the prompt, line, column) of the patch; -1: none
    tiles: Int[Array, "*B T 2"] | None = None  # as in `Inputs`
    frame: Int[Array, "*B T"] | None = None  # as in `Inputs`
    # Attention received in the blocks of the tower that `Stages.class_attention_layers` names; None: in no block.
    tower: Float[Array, "*B W N T"] | None = None
    # Features that `Decoder.add_features` adds to the hidden states after the first layers, or after every layer. Those
    # of a token that is merged into another one are lost. None: the model has no such features.
    added: Float[Array, "*B S T D"] | None = None
    marked: Bool[Array, "*B T"] | None = None  # for policies that choose tokens in one stage and use them in later ones

    @classmethod
    def of(cls, inputs: Inputs, x: Array, added: Array | None, tower: Array | None) -> Tokens:
        """The tokens of prompts before any layer, from `Inputs` and what `embed` of the model returns."""
        of_inputs = fields_of(inputs, "positions", "is_vision", "valid", "grid", "tiles", "frame")
        source, size = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]), jnp.ones(x.shape[:2])
        return cls(x=x, **of_inputs, source=source, size=size, tower=tower, added=added)

    @property
    def tower_attention(self) -> Float[Array, "*B W T"]:
        """`tower`, averaged over heads. Only for policies with `Stages.class_attention_layers`."""
        assert self.tower is not None
        return jnp.mean(self.tower, axis=-2)


def shorten(tokens: Tokens, kept: Bool[Array, " T"], length: int) -> Tokens:
    """The kept tokens, in their order, in a row of `length`, of which the rest is padding. Unbatched."""
    order = jnp.argsort(~kept, stable=True)[:length]
    tower = None if tokens.tower is None else tokens.tower[..., order]
    added = None if tokens.added is None else tokens.added[:, order]
    # In all other fields, tokens are the first axis.
    rest = jax.tree.map(lambda x: x[order], dataclasses.replace(tokens, tower=None, added=None))
    return dataclasses.replace(rest, valid=rest.valid & kept[order], tower=tower, added=added)


# --- videos ----------------------------------------------------------------------------------------------------------
# A view is a group of patches of `Tokens.grid` with lines and columns of their own: a frame of a video, an image, or a
# tile of an image in some families. `Tokens.frame` says which views are the frames of one video. Every other view is
# treated as a video of one frame.


def patches(tokens: Tokens) -> Bool[Array, " T"]:
    """Vision tokens with a position on the grid; others, such as newlines, have none."""
    return tokens.valid & tokens.is_vision & (tokens.grid[:, 1] >= 0)


def videos(tokens: Tokens) -> Int[Array, " T"]:
    """The video of each token, as the number of its first view; 0 for text."""
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
    size = sum_by(tokens.grid[:, 0], patch.astype(jnp.int32), tokens)[tokens.grid[:, 0]]  # patches of the token's frame
    # If all patches are still there, the same patch one frame before is `size` patches before. Checked below.
    at = tokens_at(jnp.where(patch, place, length), length)[jnp.maximum(place - size, 0)]
    same = jnp.all(tokens.grid[at] == tokens.grid - jnp.array([1, 0, 0]), axis=1)
    return jnp.where(patch & same & (tokens.frame > 0) & (tokens.frame[at] == tokens.frame - 1), at, -1)
