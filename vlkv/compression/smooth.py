"""Smoothing of scores, so that the neighbours of an attended token are kept too.

The last tokens of a prompt attend to what the next token needs. The rest of the answer often needs the neighbours.
A one-sided kernel adds the score of an attended token to the tokens after it in reading order.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import use_python_numbers
from vlkv.errors import InputError


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Smooth:
    """A stage of `compose`: every score becomes the mean, or the maximum, of the scores around it.

        Smooth(9)                        tokens t-4 ... t+4
        Smooth(4, one_sided=True)        tokens t-3 ... t
        Smooth((3, 5))                   3 lines x 5 columns of the image's grid
        Smooth((4, 4), one_sided=True)   a patch, the 3 lines above it and the 3 columns to its left

    Only tokens in scope are used; at an edge the window contains fewer of them. On the grid a window stays within one
    image or tile, and a token without a grid position (a newline, a class token) keeps its score.

    Attributes:
        kernel: tokens along the sequence; or (lines, columns) on the grid.
        one_sided: True: the window ends at the token. False: the token is in the middle, and sizes must be odd.
        pooling: "avg" or "max".

    Raises:
        InputError: sizes that are not whole numbers of at least 1, or an even size of a two-sided window.
    """

    kernel: int | tuple[int, int]
    one_sided: bool = False
    pooling: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        use_python_numbers(self)
        sizes = self.kernel if isinstance(self.kernel, tuple) else (self.kernel,)
        if len(sizes) not in (1, 2) or not all(type(size) is int and size >= 1 for size in sizes):
            raise InputError(f"Smooth: kernel={self.kernel!r} must be a whole number of at least 1, or two of them")
        if not isinstance(self.one_sided, bool):
            raise InputError(f"Smooth: one_sided={self.one_sided!r} must be True or False")
        if not self.one_sided and any(size % 2 == 0 for size in sizes):
            raise InputError(f"Smooth: kernel={self.kernel!r} must be odd, or give one_sided=True")
        if self.pooling not in ("avg", "max"):
            raise InputError(f'Smooth: pooling={self.pooling!r} must be "avg" or "max"')

    def __call__(self, scores: Float[Array, "K T"], obs: Observation) -> Float[Array, "K T"]:
        """The smoothed scores of one layer; those of tokens out of scope do not change."""
        if isinstance(self.kernel, int):
            place = jnp.arange(obs.in_scope.shape[0])
            nothing = jnp.zeros_like(place)
            smoothed = self._reduce(scores, obs.in_scope, [(self.kernel, place, nothing, nothing)])
            return jnp.where(obs.in_scope, smoothed, scores)
        if obs.grid is None:
            raise InputError("scores are smoothed on the image: pass grid=inputs.grid[row]")
        image, line, column = obs.grid.T
        on_grid = obs.in_scope & (obs.grid >= 0).all(axis=1)
        lines, columns = self.kernel
        smoothed = self._reduce(scores, on_grid, [(columns, column, line, image), (lines, line, column, image)])
        return jnp.where(on_grid, smoothed, scores)

    def _reduce(
        self,
        scores: Float[Array, "K T"],
        among: Bool[Array, " T"],
        axes: list[tuple[int, Int[Array, " T"], Int[Array, " T"], Int[Array, " T"]]],
    ) -> Float[Array, "K T"]:
        """One pass per axis: window size, coordinate along the axis, and two coordinates that must be equal."""
        largest = self.pooling == "max"
        values = jnp.where(among, scores, -jnp.inf if largest else 0.0)
        counts = among.astype(scores.dtype)[None]
        for size, place, *same in axes:
            before, after = (size - 1, 0) if self.one_sided else (size // 2, size // 2)
            order = jnp.lexsort((place, *same))
            values = _along(values, order, place, same, before, after, largest=largest)
            counts = _along(counts, order, place, same, before, after, largest=False)
        return values if largest else values / jnp.maximum(counts, 1.0)


def _along(
    x: Float[Array, "R T"],
    order: Int[Array, " T"],
    place: Int[Array, " T"],
    same: list[Int[Array, " T"]],
    before: int,
    after: int,
    *,
    largest: bool,
) -> Float[Array, "R T"]:
    """Sum or maximum over tokens at coordinates from place - before to place + after whose `same` coordinates agree.

    After sorting by `same` and place, a token at a distance of at most n is at most n entries away.
    """
    length = place.shape[0]
    entry = jnp.arange(length)
    x, place, same = x[:, order], place[order], [s[order] for s in same]
    total = x
    for offset in [*range(-before, 0), *range(1, after + 1)]:
        other = jnp.clip(entry + offset, 0, length - 1)
        distance = place[other] - place
        inside = (entry + offset == other) & (distance >= -before) & (distance <= after)
        for s in same:
            inside &= s[other] == s
        part = jnp.where(inside, x[:, other], -jnp.inf if largest else 0.0)
        total = jnp.maximum(total, part) if largest else total + part
    return jnp.zeros_like(total).at[:, order].set(total)
