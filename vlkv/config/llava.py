"""LLaVA-1.5: a CLIP tower and a Llama or Mistral decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import text
from vlkv.config.checks import require
from vlkv.config.clip import ClipConfig


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    require("projector_hidden_act", raw.get("projector_hidden_act", "gelu"), "gelu")
    return {
        "decoder": text.decoder(raw),
        "vision": ClipConfig.from_hf(raw),
        "image_token": raw.get("image_token_index", raw.get("image_token_id", 32000)),
        "projector_bias": raw.get("multimodal_projector_bias", True),
    }
