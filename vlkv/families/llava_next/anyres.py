"""Geometry of images that are cut into tiles: choice of the resolution, removal of padding, resizing of patches.

Host code in numpy. Sizes are (height, width), in pixels or patches.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int


def best_resolution(size: tuple[int, int], choices: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The choice that shows most pixels of the image; among equals, the one with least padding, then the first one.

    Source: LLaVA-NeXT (Liu et al. 2024).
    """

    def merit(choice: tuple[int, int]) -> tuple[int, int]:
        scale = min(choice[1] / size[1], choice[0] / size[0])
        shown = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return shown, shown - choice[0] * choice[1]

    return max(choices, key=merit)


def fitted(size: tuple[int, int], target: tuple[int, int]) -> tuple[int, int]:
    """The size of the image after resizing it, with its aspect ratio, to fit into `target`; rounded up."""
    by_height, by_width = target[0] / size[0], target[1] / size[1]
    if by_width < by_height:
        return min(int(np.ceil(size[0] * by_width)), target[0]), target[1]
    return target[0], min(int(np.ceil(size[1] * by_height)), target[1])


def without_padding(
    field: Int[np.ndarray, "lines columns"], size: tuple[int, int], *, rounded: bool
) -> Int[np.ndarray, "h w"]:
    """`field` without the patches that show only padding of an image of `size` pixels; both sides lose the same number.

    `rounded`: round the result to 7 digits before truncating it, so that 23.9999999 counts as 24.
    """
    lines, columns = field.shape
    wide = size[1] / size[0] > columns / lines
    shown = size[0] * (columns / size[1]) if wide else size[1] * (lines / size[0])
    margin = ((lines if wide else columns) - int(round(shown, 7) if rounded else shown)) // 2
    return field[margin : lines - margin] if wide else field[:, margin : columns - margin]


def bilinear(
    field: Int[np.ndarray, "lines columns"], size: tuple[int, int]
) -> tuple[Int[np.ndarray, "h w 4"], Float[np.ndarray, "h w 4"]]:
    """Bilinear resizing (torch's): the four source patches of each patch, and their weights."""
    top, bottom, down = _neighbours(field.shape[0], size[0])
    left, right, across = _neighbours(field.shape[1], size[1])
    taps = [field[np.ix_(y, x)] for y in (top, bottom) for x in (left, right)]
    weights = [np.outer(y, x) for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(taps, axis=-1), np.stack(weights, axis=-1)


def means(
    field: Int[np.ndarray, "lines columns"], stride: int
) -> tuple[Int[np.ndarray, "h w taps"], Float[np.ndarray, "h w taps"]]:
    """Mean pooling: the patches of each stride x stride square, and their weights; incomplete squares are dropped."""
    lines, columns = (side // stride for side in field.shape)
    squares = field[: lines * stride, : columns * stride].reshape(lines, stride, columns, stride)
    taps = squares.transpose(0, 2, 1, 3).reshape(lines, columns, stride**2)
    return taps, np.full(taps.shape, 1 / stride**2)


def _neighbours(size: int, target: int) -> tuple[Int[np.ndarray, " t"], Int[np.ndarray, " t"], Float[np.ndarray, " t"]]:
    """For each point of the resized axis: the source points before and after it, and the weight of the latter."""
    position = np.maximum((np.arange(target) + 0.5) * (size / target) - 0.5, 0)
    before = np.minimum(position.astype(int), size - 1)
    return before, np.minimum(before + 1, size - 1), position - before
