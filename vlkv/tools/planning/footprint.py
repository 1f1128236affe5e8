"""Bytes of arrays on one chip: the chip's shard of each array, padded to tiles on a TPU.

A TPU stores the two innermost axes of an array in tiles of 8 x 128 numbers. Arrays with fewer lines have smaller tiles,
but at least 2 lines for 16-bit numbers, because two of them share a word. The runtime chooses the innermost axes of
each array so that padding is smallest; the functions here do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import jax
import numpy as np

_LANES, _LINES = 128, 8
_WORD = 4  # bytes

Rule = Callable[[tuple[int, ...], Any], int]


def plain_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array without padding, as on a GPU."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in the tiles of a TPU."""
    itemsize = np.dtype(dtype).itemsize
    if not shape or 0 in shape:
        return plain_bytes(shape, dtype) if 0 in shape else _LANES * _WORD
    packed = max(1, _WORD // itemsize)
    if len(shape) == 1:
        return _up(shape[0], _LANES * packed) * itemsize
    rest = math.prod(shape)
    return min(
        rest // (lines * lanes) * _up(lines, _tile_lines(lines, packed)) * _up(lanes, _LANES)
        for lines, lanes in permutations(shape, 2)
    ) * itemsize  # fmt: skip


def _tile_lines(lines: int, packed: int) -> int:
    """Lines of a tile: 8, or the next power of two for arrays that have fewer."""
    return min(_LINES, max(packed, 1 << (lines - 1).bit_length()))


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def rule(platform: str) -> Rule:
    """The function that computes bytes on a platform."""
    return tiled_bytes if platform == "tpu" else plain_bytes


def chip_bytes(tree: Any, platform: str) -> int:
    """Bytes of a tree's arrays on one chip, from ShapeDtypeStructs with shardings."""
    pad = rule(platform)

    def one(x: Any) -> int:
        return pad(tuple(x.shape) if x.sharding is None else x.sharding.shard_shape(tuple(x.shape)), x.dtype)

    leaves = [x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)]  # no keys
    return sum(map(one, leaves))
