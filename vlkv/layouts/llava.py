"""LLaVA-1.5: every image is one square of patches, a fixed number of tokens in raster order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import ClipConfig, ModelConfig, QwenVitConfig
from vlkv.errors import InputError
from vlkv.layouts.arranged import Arranged, count_up, number


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """From `pixel_values` [I, 3, h, w].

    Raises:
        InputError: image tokens and pixels that do not match.
    """
    assert isinstance(config.vision, ClipConfig)
    grid, first = config.vision.grid, int(config.vision.keep_class_token)
    return squares(batch, tokens, valid, config, buckets, side=grid, first=first)


def squares(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
    *,
    side: int,
    first: int = 0,
) -> Arranged:
    """The same for any family whose images are squares of `side` x `side` tokens, behind `first` that lie on no grid.

    Raises:
        InputError: image tokens and pixels that do not match.
    """
    assert isinstance(config.vision, ClipConfig | QwenVitConfig)
    pixels = batch.get("pixel_values")
    pixels = None if pixels is None else np.asarray(pixels, np.float32)
    is_vision = valid & (tokens == config.image_token)
    per_image, images = side**2 + first, 0 if pixels is None else len(pixels)
    if is_vision.sum() != images * per_image or (is_vision.sum(axis=1) % per_image).any():
        raise InputError(
            f"the prompt holds {is_vision.sum()} image tokens, but {images} image(s) of {per_image} tokens "
            f"need {images * per_image}: give one <image> mark per image"
        )
    if pixels is not None:
        want = (3, config.vision.image_size, config.vision.image_size)
        if pixels.shape[1:] != want:
            raise InputError(
                f"pixel_values have shape {pixels.shape}, expected [images, {want[0]}, {want[1]}, {want[2]}]"
            )
        pixels = np.pad(pixels, [(0, round_up(images, buckets.images) - images), (0, 0), (0, 0), (0, 0)])
    row_images = round_up(int(-(-is_vision.sum(axis=1).max() // per_image)), buckets.images)
    return Arranged(
        vision_index=number(is_vision), grid=_grid(is_vision, side, first), positions=count_up(valid),
        pixels=pixels if images else None, max_vision=row_images * per_image, max_images=row_images,
    )  # fmt: skip


def _grid(is_vision: Bool[np.ndarray, "B T"], side: int, first: int) -> Int[np.ndarray, "B T 3"]:
    """Where every patch lies. A class token lies on no grid: -1 for line and column."""
    image, place = np.divmod(np.cumsum(is_vision, axis=1) - 1, side**2 + first)
    place = place - first
    line, column = np.divmod(place, side)
    patch = is_vision & (place >= 0)
    return np.stack(
        [np.where(is_vision, image, -1), np.where(patch, line, -1), np.where(patch, column, -1)], axis=-1
    ).astype(np.int32)
