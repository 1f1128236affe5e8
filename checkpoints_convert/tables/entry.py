"""One tensor of a checkpoint, and which of our parameters it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a tensor that several of our parameters share: reshape to `view`, then take the slices."""

    view: tuple[int, ...]
    take: tuple[slice, ...]

    def of(self, array: np.ndarray) -> np.ndarray:
        """The piece."""
        return array.reshape(self.view)[self.take]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One of our parameters: its tensor's name on disk (new style) and shape there, and its path in our tree.

    Where several parameters share a tensor (fused projections), each has an entry with the same key and its part.
    """

    key: str
    path: str
    shape: tuple[int, ...]
    part: Part | None = None


def affine(key: str, path: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    """A weight and its bias."""
    yield Entry(key + ".weight", path + ".weight", shape)
    yield Entry(key + ".bias", path + ".bias", shape[:1])


def rows(key: str, path: str, shape: tuple[int, ...], first: int, count: int) -> Entry:
    """Some rows of a fused tensor."""
    return Entry(key, path, shape, Part(shape, (slice(first, first + count),)))
