"""The tokens between two layers of prefill, and their reduction.

Axes: B batch · T tokens · D width · A position axes · S first layers of the decoder · W blocks of the tower whose
attention is used · N its heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
    tower: Float[Array, "*B W N T"] | None = None  # attention received in the tower, if the policy uses it
    # What is given to the tokens after the first layers, or after every layer; see `Decoder.add_features`. A token that
    # is merged into another one loses its own. None: nothing is given.
    added: Float[Array, "*B S T D"] | None = None
    marked: Bool[Array, "*B T"] | None = None  # for policies that choose tokens in one stage and use them in later ones

    @property
    def tower_attention(self) -> Float[Array, "*B W T"]:
        """Attention received in the blocks of the tower that the policy names, averaged over heads."""
        assert self.tower is not None
        return jnp.mean(self.tower, axis=-2)


def shorten(tokens: Tokens, kept: Bool[Array, " T"], length: int) -> Tokens:
    """The kept tokens, in their order, padded to a row of `length`. Unbatched."""
    order = jnp.argsort(~kept, stable=True)[:length]
    tower = None if tokens.tower is None else tokens.tower[..., order]
    added = None if tokens.added is None else tokens.added[:, order]
    rest = jax.tree.map(lambda x: x[order], dataclasses.replace(tokens, tower=None, added=None))
    return dataclasses.replace(rest, valid=rest.valid & kept[order], tower=tower, added=added)
