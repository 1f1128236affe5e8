"""SmolVLM, SmolVLM2, Idefics3 and granite-docling, which differ in their sizes and in their `model_type`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from typing_extensions import override

from vlkv.config import Raw, positive, require, token_id
from vlkv.errors import InputError
from vlkv.families.internvl.config import InternVlWiring
from vlkv.families.smolvlm.inputs import MarkedTilesConfig
from vlkv.families.text.config import read_decoder
from vlkv.towers.vit import SiglipConfig

_TOWERS = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm")  # earlier versions wrote the last two


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVlmVisionConfig(SiglipConfig):
    """SigLIP with its last norm.

    In transformers, line i of n has the position of bucket i / n in a table of n lines. Tiles are always whole here, so
    this is line i. Float32 rounding in transformers moves some patches by one line for a few values of n, depending on
    the processor (25 on a CPU with AVX2), but for none that is published (26, 27, 32).
    """

    feature_layer: int = -1

    defaults: ClassVar = SiglipConfig.defaults | dict(
        model_type="idefics3_vision", hidden_size=1152, num_attention_heads=16, patch_size=32)  # fmt: skip


class SmolVlmConfig(MarkedTilesConfig):
    """A SigLIP tower and a Llama decoder."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        tower = raw.get("vision_config") or {}
        require("vision_config.model_type", tower.get("model_type", _TOWERS[0]), *_TOWERS)
        vision = SmolVlmVisionConfig.from_hf({**tower, "model_type": _TOWERS[0]}, -1, whole=False)
        merge = positive("scale_factor", raw.get("scale_factor", 2))
        if vision.grid % merge:
            raise InputError(f"config.json: scale_factor={merge} must divide the {vision.grid} patches per side")
        if raw.get("text_config") is None:  # the family's default, for a file without the decoder's part
            raw = {**raw, "text_config": {"rms_norm_eps": 1e-5}}
        return {
            "decoder": read_decoder({"tie_word_embeddings": False, **raw}),
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", default=128257),
            "wiring": InternVlWiring(merge=merge),
        }
