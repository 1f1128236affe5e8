"""Gemma 3 with images in transformers' form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from typing_extensions import override

from vlkv.config import Raw, positive, require, token_id
from vlkv.errors import InputError
from vlkv.families.gemma3.inputs import CropsConfig
from vlkv.families.text.config import read_decoder
from vlkv.towers.vit import SiglipConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Wiring:
    """The family's own setting.

    Attributes:
        side: vision tokens per side of an image.
    """

    side: int


class Gemma3Config(CropsConfig):
    """A SigLIP tower and a decoder in which the tokens of an image attend to each other in both directions."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        vision, text = SiglipConfig.from_hf(raw.get("vision_config") or {}, -1), raw.get("text_config") or {}
        count = positive("mm_tokens_per_image", raw.get("mm_tokens_per_image", 256))
        side = math.isqrt(count)
        if side**2 != count or vision.grid % side:
            raise InputError(f"config.json: mm_tokens_per_image={count} must be a square whose side divides the "
                             f"{vision.grid} patches per side")  # fmt: skip
        if isinstance(text, dict):  # missing fields have the family's defaults
            require("text_config.model_type", text.get("model_type", "gemma3_text"), "gemma3_text")
            text = {"model_type": "gemma3_text", **text}
        decoder = read_decoder({"tie_word_embeddings": True, **raw, "text_config": text})
        return {
            "decoder": dataclasses.replace(decoder, image_block=count),
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", "image_token_index", default=262144),
            "wiring": Gemma3Wiring(side=side),
        }
