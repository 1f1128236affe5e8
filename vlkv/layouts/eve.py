"""EVE: pictures of any shape, cut into windows; a class token before each, a token at the end of every row of windows.

All of them are vision tokens. Windows lie on the grid by row and column; class and end-of-row tokens lie on none (-1),
as they show no part of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Bool, Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import EveVisionConfig, ModelConfig
from vlkv.errors import InputError
from vlkv.layouts.arranged import Arranged, count_up


def picture_tokens(lines: int, columns: int) -> int:
    """Vision tokens of a picture of so many windows."""
    return 1 + lines * (columns + 1)


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """From `pixel_values` [I, 4, S, S], whose last channel says by ones where on its square the picture lies.

    Raises:
        InputError: image tokens and pixels that do not match, or a picture that is no rectangle of whole windows.
    """
    assert isinstance(config.vision, EveVisionConfig)
    is_vision = valid & (tokens == config.image_token)
    given = batch.get("pixel_values")
    windows = [] if given is None else [_windows(pixels, config.vision) for pixels in np.asarray(given, np.float32)]
    sizes = [picture_tokens(*made.shape[:2]) for made in windows]
    ends, row_ends = np.cumsum([0, *sizes]), np.cumsum([0, *is_vision.sum(axis=1)])
    if ends[-1] != row_ends[-1] or not np.isin(row_ends, ends).all():
        raise InputError(
            f"the prompt holds {is_vision.sum()} image tokens, but {len(sizes)} image(s) of {sizes} tokens "
            f"need {ends[-1]}: give one <image> mark per image"
        )
    first = np.searchsorted(ends, row_ends)  # image with which each row begins
    total = sum(made.shape[0] * made.shape[1] for made in windows)
    room, images = round_up(total, buckets.vision), round_up(len(windows), buckets.images)
    index, grid = np.zeros(ends[-1], np.int32), np.full((ends[-1], 3), -1, np.int32)
    pixels = np.zeros((room, 3, config.vision.window_size, config.vision.window_size), np.float32)
    member, used = np.zeros((images, room), bool), 0
    for image, made in enumerate(windows):
        lines, columns = made.shape[:2]
        count, own = lines * columns, slice(ends[image], ends[image + 1])
        pixels[used : used + count] = made.reshape(count, *made.shape[2:])
        member[image, used : used + count] = True
        # Rows of the flat embeddings: windows, the end of a row, class tokens.
        square = np.full((lines, columns + 1), room, np.int32)
        square[:, :-1] = used + np.arange(count).reshape(lines, columns)
        index[own] = [room + 1 + image, *square.ravel()]
        places = np.full((lines, columns + 1, 2), -1, np.int32)
        places[:, :-1] = np.moveaxis(np.indices((lines, columns)), 0, -1)
        grid[own, 0] = image - first[np.searchsorted(row_ends, ends[image], side="right") - 1]
        grid[own, 1:] = np.concatenate([[[-1, -1]], places.reshape(-1, 2)])
        used += count
    vision_index = np.full(tokens.shape, -1, np.int32)
    vision_index[is_vision] = index
    all_grid = np.full((*tokens.shape, 3), -1, np.int32)
    all_grid[is_vision] = grid
    return Arranged(
        vision_index=vision_index, grid=all_grid, positions=count_up(valid), pixels=pixels if windows else None,
        layout={"member": member} if windows else {},
        max_vision=round_up(int(is_vision.sum(axis=1).max()), buckets.vision),
        max_images=round_up(int(np.diff(first).max()), buckets.images),
    )  # fmt: skip


def _windows(pixels: Float[np.ndarray, "4 S S"], c: EveVisionConfig) -> Float[np.ndarray, "lines columns 3 p p"]:
    if pixels.ndim != 3 or len(pixels) != 4:
        raise InputError(f"pixel_values of an image have shape {pixels.shape}, expected [4, S, S]: the last is a mask")
    mask = pixels[3] > 0
    lines, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    size = c.window_size
    if not mask.any() or mask.sum() != len(lines) * len(columns) or len(lines) % size or len(columns) % size:
        raise InputError(f"the mask of pixel_values must be a rectangle of whole windows of {size} x {size} pixels")
    shown = pixels[:3, lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1]
    return rearrange(shown, "c (y a) (x b) -> y x c a b", a=size, b=size)
