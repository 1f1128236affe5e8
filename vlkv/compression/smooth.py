"""Smoothing of scores, so that the neighbours of a token with a high score are kept too.

The last tokens of a prompt attend to what the first token of the answer needs. Later tokens of the answer often need
its neighbours. A one-sided window adds the score of a token to those of the tokens after it in reading order. Where
attention goes next can be measured on the model itself: `vlkv.analysis.drift` makes a kernel of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32
from typing_extensions import TypeIs

from vlkv.compression.observe import Observation, not_negative
from vlkv.compression.option_types import use_python_numbers
from vlkv.errors import InputError
from vlkv.files import read_text
from vlkv.masks import tokens_of

_FAR = 2**15 - 1  # more than any number of an image, line or column; columns fit into 15 bits of `Neighbours.key`
_WIDEST = 64  # the largest offset of a measured kernel
# (tokens, weight) of each offset in reading order, or (lines, columns, weight) on the grid. A weight is a number, or a
# tuple of those of each layer, which are tuples of those of each key head.
Weights = tuple[tuple[Any, ...], ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Smooth:
    """The argument `smooth` of `compose`: every score becomes the mean, or the maximum, of the scores around it.

        Smooth(9)                        tokens t-4 ... t+4
        Smooth(4, one_sided=True)        tokens t-3 ... t
        Smooth((3, 5))                   3 lines x 5 columns of the image's grid
        Smooth((4, 4), one_sided=True)   a patch, the 3 lines above it and the 3 columns to its left
        Smooth(((0, 1.0), (1, 0.5)))     the score of t, and half of that of t-1
        Smooth("drift.json")             the kernel that `vlkv profile --what drift` has measured

    Only tokens that compete are used: those in scope that are not kept in any case. At an edge, or where a method has
    dropped tokens before, the window contains fewer of them. On the grid a window stays within one image or tile, and a
    token without a grid position (a newline, a class token) keeps its score. If a method prefers text (LookM, MEDA,
    TGVKV), text and vision tokens are smoothed separately, because their scores are not on one scale.

    With weights, "avg" is the weighted sum and "max" the largest product. At an edge the sum has fewer terms, as
    no attention comes from outside. If scores are negative, the lowest counts as 0.

    Attributes:
        kernel: tokens along the sequence; or (lines, columns) on the grid; or offsets with weights, (tokens, weight) or
            (lines, columns, weight), which say how much of a token's score moves that far ahead; or a file of them. A
            weight is a number, or a tuple with a tuple for each layer, which has a number for each key head.
        one_sided: True: the window ends at the token. False: the token is in the middle, and sizes must be odd. Offsets
            have a direction of their own.
        pooling: "avg" or "max".

    Raises:
        InputError: sizes that are not whole numbers of at least 1, an even size of a two-sided window, or a file or
            weights that are not a kernel.
    """

    kernel: int | tuple[int, int] | Weights | str
    one_sided: bool = False
    pooling: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        if isinstance(self.kernel, str):
            object.__setattr__(self, "kernel", read_kernel(Path(self.kernel)))
        use_python_numbers(self)
        if not isinstance(self.one_sided, bool):
            raise InputError(f"Smooth: one_sided={self.one_sided!r} must be True or False")
        if self.pooling not in ("avg", "max"):
            raise InputError(f'Smooth: pooling={self.pooling!r} must be "avg" or "max"')
        if _has_offsets(self.kernel):
            if self.one_sided:
                raise InputError("Smooth: one_sided=True is for sizes: offsets with weights have their own direction")
            return _check_weights(self.kernel)
        sizes: tuple[Any, ...] = self.kernel if isinstance(self.kernel, tuple) else (self.kernel,)
        if (isinstance(self.kernel, tuple) and len(sizes) != 2) or not all(
            type(size) is int and size >= 1 for size in sizes
        ):
            raise InputError(f"Smooth: kernel={self.kernel!r} must be a whole number of at least 1, or two of them")
        if not self.one_sided and any(size % 2 == 0 for size in sizes):
            raise InputError(f"Smooth: kernel={self.kernel!r} must be odd, or give one_sided=True")

    @property
    def weights(self) -> Float[np.ndarray, "L K *sizes"] | None:
        """The weight of each place of the window, whose reach is `_reaches`; None: all are 1.

        L and K are 1 if the weights are the same in all layers and heads.
        """
        if not _has_offsets(self.kernel):
            return None
        before, sizes = [reach[0] for reach in self._reaches], [sum(reach) + 1 for reach in self._reaches]
        each = [np.atleast_2d(np.asarray(weight, np.float32)) for *_, weight in self.kernel]
        table = np.zeros((*each[0].shape, *sizes), np.float32)
        for (*offset, _), weight in zip(self.kernel, each, strict=True):
            place: tuple[Any, ...] = tuple(n - int(d) for n, d in zip(before, offset, strict=True))
            table[(slice(None), slice(None), *place)] = weight
        return table

    def check_model(self, layers: int) -> None:
        """Raises InputError if the weights are those of a model with another number of layers with full attention."""
        if self.weights is not None and len(self.weights) not in (1, layers):
            raise InputError(f"Smooth: the kernel has weights for {len(self.weights)} layers, but the model has "
                             f"{layers}: measure one for this model")  # fmt: skip

    def __call__(self, scores: Float[Array, "K T"], obs: Observation) -> Float[Array, "K T"]:
        """The smoothed scores of one layer; those of tokens out of scope do not change."""
        weights: Array | None = None
        if (table := self.weights) is not None:
            if table.shape[1] not in (1, len(scores)):
                raise InputError(f"Smooth: the kernel has weights for {table.shape[1]} key heads, but the model has "
                                 f"{len(scores)}: measure one for this model")  # fmt: skip
            weights = jnp.asarray(table)[obs.layer if len(table) > 1 else 0]
            scores = jnp.where(obs.in_scope, not_negative(scores, obs.in_scope), scores)
        if len(self._reaches) == 1:
            smoothed = self._reduce(scores, obs.in_scope, weights, self._along_tokens)
            return jnp.where(obs.in_scope, smoothed, scores)
        if obs.grid is None:
            raise InputError("scores are smoothed on the image: pass grid=inputs.grid[row]")
        on_grid = obs.in_scope & (obs.grid >= 0).all(axis=1)
        near = Neighbours(obs.grid, on_grid)
        smoothed = self._reduce(scores, on_grid, weights, lambda x, weights: self._on_grid(x, weights, near))
        return jnp.where(on_grid, smoothed, scores)

    def _reduce(
        self,
        scores: Float[Array, "K T"],
        among: Bool[Array, " T"],
        weights: Float[Array, "#K *sizes"] | None,
        gather: Callable[[Float[Array, "R T"], Array | None], Array],
    ) -> Float[Array, "K T"]:
        """The mean or the maximum of each token's window; `gather` sums or takes the maximum over all windows."""
        if self.pooling == "max":
            return gather(jnp.where(among, scores, self._nothing), weights)
        if weights is not None:
            return gather(jnp.where(among, scores, 0.0), weights)
        # A last row of ones counts the tokens of each window.
        total = gather(jnp.where(among, jnp.concatenate([scores, jnp.ones_like(scores[:1])]), 0.0), None)
        return total[:-1] / jnp.maximum(total[-1:], 1.0)

    def _combine(self, x: Array, y: Array) -> Array:
        return jnp.maximum(x, y) if self.pooling == "max" else x + y

    @property
    def _nothing(self) -> float:  # the neutral element of `_combine`; weighted scores are not negative
        return -math.inf if self.pooling == "max" and self.weights is None else 0.0

    @property
    def _reaches(self) -> tuple[tuple[int, int], ...]:
        """How many tokens (or lines, and columns) before and after a token its window contains."""
        if _has_offsets(self.kernel):
            axes = list(zip(*self.kernel, strict=True))[:-1]
            return tuple((max(0, int(max(axis))), max(0, -int(min(axis)))) for axis in axes)
        sizes: tuple[Any, ...] = self.kernel if isinstance(self.kernel, tuple) else (self.kernel,)
        return tuple((size - 1, 0) if self.one_sided else (size // 2, size // 2) for size in sizes)

    def _weighted(self, x: Float[Array, "R T"], weight: Float[Array, "#R #T"]) -> Float[Array, "R T"]:
        return jnp.where(weight > 0, x * weight, self._nothing)

    def _along_tokens(self, x: Float[Array, "R T"], weights: Float[Array, "#R size"] | None) -> Float[Array, "R T"]:
        (reach,) = self._reaches
        if weights is None:
            reduce = jax.lax.max if self.pooling == "max" else jax.lax.add
            return jax.lax.reduce_window(x, self._nothing, reduce, (1, sum(reach) + 1), (1, 1), [(0, 0), reach])
        around, total = jnp.pad(x, [(0, 0), reach], constant_values=self._nothing), jnp.full_like(x, self._nothing)
        for place in range(weights.shape[1]):
            shifted = around[:, place : place + x.shape[1]]
            total = self._combine(total, self._weighted(shifted, weights[:, place, None]))
        return total

    def _on_grid(
        self, x: Float[Array, "R T"], weights: Float[Array, "#R lines columns"] | None, near: Neighbours
    ) -> Float[Array, "R T"]:
        """Searches for the token at each position of the window, because any position may have none.

        The outer loop is over the lines of the window, the inner one over the entries of a line.
        """
        (above, below), (left, right) = self._reaches
        x = x[:, near.order]

        def add_line(i: Int[Array, ""], total: Float[Array, "R T"]) -> Float[Array, "R T"]:
            first, inside = near.line(i - above, lines=(above, below), left=left)

            def add(j: Int[Array, ""], total: Float[Array, "R T"]) -> Float[Array, "R T"]:
                entry, there = near.entry(first + j, inside, right=right)
                found = x[:, entry]
                if weights is not None:
                    y, z = near.place[entry] - near.place + above, near.column[entry] - near.column + left
                    found = self._weighted(found, weights[:, y, z])
                return self._combine(total, jnp.where(there, found, self._nothing))

            return jax.lax.fori_loop(0, left + right + 1, add, total)

        total = jax.lax.fori_loop(0, above + below + 1, add_line, jnp.full_like(x, self._nothing))
        return jnp.zeros_like(total).at[:, near.order].set(total)


def _has_offsets(kernel: Any) -> TypeIs[Weights]:
    return isinstance(kernel, tuple) and len(kernel) > 0 and all(isinstance(each, tuple) for each in kernel)


def _check_weights(kernel: tuple[Any, ...]) -> None:
    """Raises InputError unless offsets are whole numbers of one kind, each once, with weights of at least 0."""
    offsets = [each[:-1] for each in kernel]
    fits = len({len(each) for each in kernel}) == 1 and len(offsets[0]) in (1, 2) and len({*offsets}) == len(offsets)
    fits = fits and all(type(d) is int and abs(d) <= _WIDEST for offset in offsets for d in offset)
    if fits:
        try:
            weights = np.asarray([each[-1] for each in kernel])
            fits = weights.ndim in (1, 3) and weights.dtype.kind in "iuf" and bool(np.isfinite(weights).all())
            fits = fits and bool((weights >= 0).all() and weights.any())
        except (TypeError, ValueError):
            fits = False
    if not fits:
        raise InputError(f"Smooth: kernel={repr(kernel)[:60]} must be (tokens, weight) or (lines, columns, weight) of "
                         f"different offsets up to {_WIDEST}, with weights of at least 0")  # fmt: skip


def read_kernel(path: Path) -> Weights:
    """The kernel of a file that `vlkv profile --what drift` or `vlkv tune` has written.

    Raises:
        InputError: no such file, or it has no kernel.
    """
    text = read_text(path)
    if text is None:
        raise InputError(f"{path}: no such kernel; `vlkv profile --what drift` makes one")
    try:
        kernel = _tuples(json.loads(text)["kernel"])
    except (ValueError, TypeError, KeyError, RecursionError):
        kernel = None
    if not (isinstance(kernel, tuple) and _has_offsets(kernel)):
        raise InputError(f"{path}: not a kernel; make it again with `vlkv profile --what drift`")
    return kernel


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


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
