"""InternVL: pictures come as square tiles, each a fixed number of tokens in raster order, one after another.

Every tile is an image of its own on the grid, the thumbnail (the last, where there are several) too: the tower sees
them apart, no token says where a tile lay in its picture, and what transformers' processor returns does not tell.
Only the tiles' tokens are vision; the marks `<img>` and `</img>` around a picture, and the `Frame1: ` of a video, are
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import InternVitConfig, ModelConfig
from vlkv.errors import InputError
from vlkv.layouts.arranged import Arranged, count_up, number


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """From `pixel_values` [I, 3, h, w], the tiles of the whole batch in the prompts' order.

    Raises:
        InputError: image tokens and tiles that do not match.
    """
    assert isinstance(config.vision, InternVitConfig)
    pixels = batch.get("pixel_values")
    pixels = None if pixels is None else np.asarray(pixels, np.float32)
    is_vision = valid & (tokens == config.image_token)
    per_tile, tiles = config.wiring.tokens, 0 if pixels is None else len(pixels)
    if is_vision.sum() != tiles * per_tile or (is_vision.sum(axis=1) % per_tile).any():
        raise InputError(
            f"the prompt holds {is_vision.sum()} image tokens, but {tiles} tile(s) of {per_tile} tokens "
            f"need {tiles * per_tile}: give one <image> mark per image"
        )
    if pixels is not None:
        side = config.vision.image_size
        if pixels.shape[1:] != (3, side, side):
            raise InputError(f"pixel_values have shape {pixels.shape}, expected [tiles, 3, {side}, {side}]")
        pixels = np.pad(pixels, [(0, round_up(tiles, buckets.images) - tiles), (0, 0), (0, 0), (0, 0)])
    row_tiles = round_up(int(is_vision.sum(axis=1).max() // per_tile), buckets.images)
    tile, place = np.divmod(np.cumsum(is_vision, axis=1) - 1, per_tile)
    line, column = np.divmod(place, config.vision.grid // config.wiring.merge)
    grid = np.where(is_vision[..., None], np.stack([tile, line, column], axis=-1), -1).astype(np.int32)
    return Arranged(
        vision_index=number(is_vision), grid=grid, positions=count_up(valid),
        pixels=pixels if tiles else None, max_vision=row_tiles * per_tile, max_images=row_tiles,
    )  # fmt: skip
