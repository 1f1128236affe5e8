"""InternVL2.5 and 3 in transformers' form: an InternViT tower and a Qwen2 or Llama decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config import text
from vlkv.config.checks import require
from vlkv.config.conversations import Conversation
from vlkv.config.internvit import InternVitConfig
from vlkv.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVlWiring:
    """What lies between tower and decoder, and what else is InternVL's own.

    Attributes:
        merge: patches per side that become one vision token.
        tokens: vision tokens of a tile.
        min_tiles: a picture becomes at least so many tiles, the thumbnail not counted.
        max_tiles: and at most so many.
        thumbnail: whether the whole picture follows its tiles, once more, where they are several.
        conversation: how prompts are written; None: the checkpoint has a chat template.
    """

    merge: int
    tokens: int
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    conversation: Conversation | None = None


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    require("projector_hidden_act", raw.get("projector_hidden_act", "gelu"), "gelu")
    require("vision_feature_select_strategy", raw.get("vision_feature_select_strategy", "default"), "default")
    vision = InternVitConfig.from_hf(raw.get("vision_config") or {}, raw.get("vision_feature_layer", -1))
    merge = merged(raw.get("downsample_ratio", 0.5), vision)
    return {
        "decoder": text.decoder(raw),
        "vision": vision,
        "image_token": raw.get("image_token_id", 151667),
        "wiring": InternVlWiring(merge=merge, tokens=(vision.grid // merge) ** 2),
    }


def merged(ratio: object, vision: InternVitConfig) -> int:
    """Patches per side that become one token, from `downsample_ratio`; InputError unless they tile the grid."""
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or (1 / ratio) % 1 or vision.grid % int(1 / ratio):
        raise InputError(f"config.json: downsample_ratio={ratio!r} must be one over a divisor of the "
                         f"{vision.grid} patches per side")  # fmt: skip
    return int(1 / ratio)
