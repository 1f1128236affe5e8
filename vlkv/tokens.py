"""What flows between two layers while a prompt is read, and how it gets shorter.

Axes: B batch · T tokens · D width · A position axes · W watched blocks of the tower · N its heads.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Hidden states, and what each of them is. A policy's `reduce` sees one row, without B."""

    x: Float[Array, "*B T D"]
    positions: Int[Array, "*B T A"]
    is_vision: Bool[Array, "*B T"]
    valid: Bool[Array, "*B T"]
    source: Int[Array, "*B T"]  # which token of the prompt it is
    size: Float[Array, "*B T"]  # how many tokens of the prompt it stands for
    grid: Int[Array, "*B T 3"]  # number of its image in the row, line and column of its patch; -1: on no grid
    parts: Int[Array, "*B T 2"] | None = None  # as in `Inputs`
    tower: Float[Array, "*B W N T"] | None = None  # attention in the tower, where a policy watches it


def shorten(tokens: Tokens, kept: Bool[Array, " T"], length: int) -> Tokens:
    """The tokens kept, in their order, in a row of `length`; what is left of it is padding. Unbatched."""
    order = jnp.argsort(~kept, stable=True)[:length]
    tower = None if tokens.tower is None else tokens.tower[..., order]
    rest = jax.tree.map(lambda x: x[order], dataclasses.replace(tokens, tower=None))
    return dataclasses.replace(rest, valid=rest.valid & kept[order], tower=tower)
