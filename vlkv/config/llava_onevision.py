"""LLaVA-OneVision: a SigLIP tower over tiles and frames, and a Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import text
from vlkv.config.anyres import AnyRes, VideoPooling, most_tiles, pinpoints
from vlkv.config.checks import require
from vlkv.config.siglip import SiglipConfig


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    require("projector_hidden_act", raw.get("projector_hidden_act", "gelu"), "gelu")
    require("use_image_newline_parameter", raw.get("use_image_newline_parameter", True), True)
    tower = SiglipConfig.from_hf(raw)
    sides = [384 * n for n in range(1, 7)]
    points = raw.get("image_grid_pinpoints") or [[height, width] for height in sides for width in sides]
    decoder = {"model_type": "qwen2", **(raw.get("text_config") or {})}
    # transformers ties where either field says so.
    tied = bool(raw.get("tie_word_embeddings") or decoder.get("tie_word_embeddings"))
    return {
        "decoder": text.decoder({**raw, "text_config": decoder, "tie_word_embeddings": tied}),
        "vision": tower,
        "image_token": raw.get("image_token_index", raw.get("image_token_id", 151646)),
        "video_token": raw.get("video_token_index", raw.get("video_token_id", 151647)),
        "projector_bias": raw.get("multimodal_projector_bias", True),
        "wiring": AnyRes(
            pinpoints=pinpoints(points, tower.image_size),
            most_tiles=most_tiles(raw.get("vision_aspect_ratio", "anyres_max_9")),
            only_alone=True,
            video=VideoPooling(mode="bilinear", newline="video"),
        ),
    }
