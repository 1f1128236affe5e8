"""What a family makes of a batch's pictures: where each vision token comes from, and where it lies.

Axes: B batch · T tokens · A position axes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Bool, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arranged:
    """One batch, on the host. `pixels` and `layout` are padded to buckets; the rest is not yet."""

    vision_index: Int[np.ndarray, "B T"]  # row of the batch's flat vision embeddings; -1: text
    grid: Int[np.ndarray, "B T 3"]  # number of its image in the row, line and column of its patch; -1: on no grid
    positions: Int[np.ndarray, "B T A"]  # what RoPE sees
    pixels: np.ndarray | None
    layout: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # what the wiring must know of the pixels
    max_vision: int  # bound on the vision tokens of any row
    max_images: int  # bound on the images of any row


def count_up(valid: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T 1"]:
    """Positions 0, 1, 2... of the valid tokens of each row, on either side of padding."""
    return np.maximum(np.cumsum(valid, axis=1) - 1, 0).astype(np.int32)[..., None]


def number(mask: Bool[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """0, 1, 2... over the batch, row after row, where the mask is set; -1 elsewhere."""
    return np.where(mask, np.cumsum(mask.ravel()).reshape(mask.shape) - 1, -1).astype(np.int32)
