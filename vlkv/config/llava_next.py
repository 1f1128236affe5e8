"""LLaVA-NeXT and LLaVA-NeXT-Video: a CLIP tower over tiles, and a Llama, Mistral or Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import text
from vlkv.config.anyres import AnyRes, VideoPooling, pinpoints
from vlkv.config.checks import positive, require
from vlkv.config.clip import ClipConfig
from vlkv.errors import InputError

# The class defaults of transformers.
_TOWER = dict(hidden_size=1024, intermediate_size=4096, patch_size=14, image_size=336, num_hidden_layers=24,
              num_attention_heads=16)  # fmt: skip
_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig of a `llava_next`; raises InputError for what we do not honour."""
    require("projector_hidden_act", raw.get("projector_hidden_act", "gelu"), "gelu")
    require("use_image_newline_parameter", raw.get("use_image_newline_parameter", True), True)
    # The tiles of a picture make one grid, on which a class token has no place.
    require("vision_feature_select_strategy", raw.get("vision_feature_select_strategy", "default"), "default")
    tower = ClipConfig.from_hf({**raw, "vision_config": raw.get("vision_config") or _TOWER})
    return {
        "decoder": text.decoder(raw),
        "vision": tower,
        "image_token": raw.get("image_token_index", raw.get("image_token_id", 32000)),
        "projector_bias": raw.get("multimodal_projector_bias", True),
        "wiring": AnyRes(pinpoints=pinpoints(raw.get("image_grid_pinpoints") or _PINPOINTS, tower.image_size)),
    }


def read_video(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a `llava_next_video`: frames are pooled before they are projected, and no newline is added."""
    mode = raw.get("spatial_pool_mode", "average")
    if mode != "average":
        raise InputError(f"config.json: spatial_pool_mode={mode!r} is not supported (only 'average')")
    stride = positive("spatial_pool_stride", raw.get("spatial_pool_stride", 2))
    fields = read({"image_token_index": raw.get("image_token_id", 32001), **raw})
    pooling = VideoPooling(mode="average", stride=stride, before_projector=True)
    return {
        **fields,
        "video_token": raw.get("video_token_index", raw.get("video_token_id", 32000)),
        "wiring": AnyRes(pinpoints=fields["wiring"].pinpoints, video=pooling),
    }
