"""Smoothing of scores, so that the neighbours of a token with a high score are kept too.

The last tokens of a prompt attend to what the first token of the answer needs. Later tokens of the answer often need
its neighbours. A one-sided window adds the score of a token to those of the tokens after it in reading order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from vlkv.compression.observe import Observation
from vlkv.compression.option_types import use_python_numbers
from vlkv.errors import InputError
from vlkv.masks import tokens_of

_FAR = 2**15 - 1  # more than any number of an image, line or column; columns fit into 15 bits of `Neighbours.key`


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Smooth:
    """The argument `smooth` of `compose`: every score becomes the mean, or the maximum, of the scores around it.

        Smooth(9)                        tokens t-4 ... t+4
        Smooth(4, one_sided=True)        tokens t-3 ... t
        Smooth((3, 5))                   3 lines x 5 columns of the image's grid
        Smooth((4, 4), one_sided=True)   a patch, the 3 lines above it and the 3 columns to its left

    Only tokens that compete are used: those in scope that are not kept in any case. At an edge, or where a method has
    dropped tokens before, the window contains fewer of them. On the grid a window stays within one image or tile, and a
    token without a grid position (a newline, a class token) keeps its score. If a method prefers text (LookM, MEDA,
    TGVKV), text and vision tokens are smoothed separately, because their scores are not on one scale.

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
        if (isinstance(self.kernel, tuple) and len(sizes) != 2) or not all(
            type(size) is int and size >= 1 for size in sizes
        ):
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
            smoothed = self._reduce(scores, obs.in_scope, self._along_tokens)
            return jnp.where(obs.in_scope, smoothed, scores)
        if obs.grid is None:
            raise InputError("scores are smoothed on the image: pass grid=inputs.grid[row]")
        on_grid = obs.in_scope & (obs.grid >= 0).all(axis=1)
        near = Neighbours(obs.grid, on_grid)
        smoothed = self._reduce(scores, on_grid, lambda x: self._on_grid(x, near))
        return jnp.where(on_grid, smoothed, scores)

    def _reduce(
        self, scores: Float[Array, "K T"], among: Bool[Array, " T"], gather: Callable[[Float[Array, "R T"]], Array]
    ) -> Float[Array, "K T"]:
        """The mean or the maximum of each token's window; `gather` sums or takes the maximum over all windows."""
        if self.pooling == "max":
            return gather(jnp.where(among, scores, -jnp.inf))
        # A last row of ones counts the tokens of each window.
        total = gather(jnp.where(among, jnp.concatenate([scores, jnp.ones_like(scores[:1])]), 0.0))
        return total[:-1] / jnp.maximum(total[-1:], 1.0)

    def _combine(self, x: Array, y: Array) -> Array:
        return jnp.maximum(x, y) if self.pooling == "max" else x + y

    @property
    def _nothing(self) -> float:  # the neutral element of `_combine`
        return -math.inf if self.pooling == "max" else 0.0

    def _reach(self, size: int) -> tuple[int, int]:
        """How many tokens (or lines, or columns) before and after a token its window contains."""
        return (size - 1, 0) if self.one_sided else (size // 2, size // 2)

    def _along_tokens(self, x: Float[Array, "R T"]) -> Float[Array, "R T"]:
        assert isinstance(self.kernel, int)
        reduce = jax.lax.max if self.pooling == "max" else jax.lax.add
        around = [(0, 0), self._reach(self.kernel)]
        return jax.lax.reduce_window(x, self._nothing, reduce, (1, self.kernel), (1, 1), around)

    def _on_grid(self, x: Float[Array, "R T"], near: Neighbours) -> Float[Array, "R T"]:
        """Searches for the token at each position of the window, because any position may have none.

        The outer loop is over the lines of the window, the inner one over the entries of a line.
        """
        assert isinstance(self.kernel, tuple)
        lines, columns = self.kernel
        (above, below), (left, right) = map(self._reach, self.kernel)
        x = x[:, near.order]

        def add_line(i: Int[Array, ""], total: Float[Array, "R T"]) -> Float[Array, "R T"]:
            first, inside = near.line(i - above, lines=(above, below), left=left)

            def add(j: Int[Array, ""], total: Float[Array, "R T"]) -> Float[Array, "R T"]:
                entry, there = near.entry(first + j, inside, right=right)
                return self._combine(total, jnp.where(there, x[:, entry], self._nothing))

            return jax.lax.fori_loop(0, columns, add, total)

        total = jax.lax.fori_loop(0, lines, add_line, jnp.full_like(x, self._nothing))
        return jnp.zeros_like(total).at[:, near.order].set(total)


class Neighbours:
    """Tokens sorted by image, line and column of a grid; tokens outside of the mask come last, and are in no window.

    All arrays have this order. An entry is an index into it. A row is a line that has at least one token; rows are
    numbered over all images.
    """

    def __init__(self, grid: Int[Array, "T 3"], among: Bool[Array, " T"]) -> None:
        image, line, column = jnp.where(among, grid.T, _FAR)
        self.order = jnp.lexsort((column, line, image))
        self.image, self.place, self.column = (x[self.order] for x in (image, line, column))
        # Whether an entry is the first one of its row. `place` is the line on the grid, and `row` skips empty lines.
        begins = (jnp.diff(self.image, prepend=-1) != 0) | (jnp.diff(self.place, prepend=-1) != 0)
        self.row = jnp.cumsum(begins) - 1  # the row of each entry
        self.head = tokens_of(begins)  # the first entry of each row
        self.key = self._key(self.row, self.column)

    def _key(self, row: Int[Array, " T"], column: Int[Array, " T"]) -> UInt32[Array, " T"]:
        """A number that increases along `order`, for binary search."""
        return row.astype(jnp.uint32) << 15 | jnp.clip(column, 0, _FAR).astype(jnp.uint32)

    def line(
        self, offset: Int[Array, ""], *, lines: tuple[int, int], left: int
    ) -> tuple[Int[Array, " T"], tuple[Int[Array, " T"], Bool[Array, " T"]]]:
        """For each token, one line of its window: the row that is `offset` rows away.

        Args:
            offset: number of rows; negative: above the token.
            lines: how many lines above and below a token its window contains.
            left: how many columns to the left of it.

        Returns:
            The first entry of the row that may be in the window; then the row, and whether it is in the window: in the
            same image and not too far away, since lines without tokens count, too.
        """
        row = self.row + offset
        head = self.head.at[row].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        distance = self.place[head] - self.place
        inside = (head >= 0) & (self.image[head] == self.image) & (self.image < _FAR)
        inside &= (distance >= -lines[0]) & (distance <= lines[1])
        return jnp.searchsorted(self.key, self._key(jnp.maximum(row, 0), self.column - left)), (row, inside)

    def entry(
        self, entry: Int[Array, " T"], of: tuple[Int[Array, " T"], Bool[Array, " T"]], *, right: int
    ) -> tuple[Int[Array, " T"], Bool[Array, " T"]]:
        """The entry, limited to valid indices, and whether it is in each token's window.

        `of` is the row and whether it is in the window, from `line`; `right` the number of columns to the right.
        """
        row, inside = of
        entry, exists = jnp.minimum(entry, len(self.key) - 1), entry < len(self.key)
        return entry, inside & exists & (self.row[entry] == row) & (self.column[entry] <= self.column + right)
