"""A prompt without images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from vlkv.buckets import Buckets
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.layouts.arranged import Arranged, count_up


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """All tokens are text; raises InputError if there are pixels."""
    del config, buckets
    if batch.get("pixel_values") is not None:
        raise InputError("the model has no vision tower and cannot be given pixel_values")
    return Arranged(
        vision_index=np.full(tokens.shape, -1, np.int32), grid=np.full((*tokens.shape, 3), -1, np.int32),
        positions=count_up(valid), pixels=None, max_vision=0, max_images=0,
    )  # fmt: skip
