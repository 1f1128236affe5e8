"""Qwen2-VL and Qwen2.5-VL: a tower at native resolution and a Qwen2 decoder with M-RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import require
from vlkv.config.decoder import DecoderConfig
from vlkv.config.qwen2_vision import QwenVisionConfig
from vlkv.errors import InputError


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig, from a flat config.json (transformers 4) or a nested one (5).

    Raises:
        InputError: what we do not honour, or parts that do not fit together.
    """
    family = raw["model_type"]
    part = dict(raw.get("text_config") or raw)
    if part.get("model_type") != family:
        require("text_config.model_type", part.get("model_type", f"{family}_text"), f"{family}_text")
    part["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings") or part.get("tie_word_embeddings"))
    decoder = DecoderConfig.from_hf(family, part)
    if decoder.rope.sections is None or len(decoder.rope.sections) != 3:
        raise InputError(f"config.json: mrope_section={decoder.rope.sections!r} must give time, line and column "
                         "their channels")  # fmt: skip
    vision = QwenVisionConfig.from_hf(family, raw.get("vision_config") or {})
    if vision.out_width != decoder.width:
        raise InputError(f"config.json: vision_config makes {vision.out_width} channels, the decoder takes "
                         f"{decoder.width}")  # fmt: skip
    return {
        "decoder": decoder,
        "vision": vision,
        "image_token": raw.get("image_token_id", 151655),
        "video_token": raw.get("video_token_id", 151656),
    }
