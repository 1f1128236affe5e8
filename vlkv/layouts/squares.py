"""MobileVLM-V2 and Qwen-VL: every image is one square of tokens (pooled patches; queries by their own places)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from vlkv.buckets import Buckets
from vlkv.config import ModelConfig
from vlkv.layouts import llava
from vlkv.layouts.arranged import Arranged


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """From `pixel_values` [I, 3, h, w]; raises InputError for image tokens and pixels that do not match."""
    return llava.squares(batch, tokens, valid, config, buckets, side=config.wiring.side)
