"""Tensor names of Qwen3.5: those of Qwen3-VL, with the decoder's own."""

from __future__ import annotations

import dataclasses

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig
from vlkv.families.qwen3_vl.weights import names as qwen3_vl_names
from vlkv.families.text.weights import unused


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    return dataclasses.replace(qwen3_vl_names(config), unused=unused(config, ""))
