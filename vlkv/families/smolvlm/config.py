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
from vlkv.families.text.published import PUBLISHED as TEXT
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


# --- published sizes --------------------------------------------------------------------------------------------------

_BASE = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, image_size=512,
             patch_size=16)  # fmt: skip
_SO400M = dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, patch_size=14)


def _smollm(width: int, mlp_width: int, layers: int, heads: int, kv_heads: int, **changes: Any) -> dict[str, Any]:
    return dict(model_type="llama", vocab_size=49280, hidden_size=width, intermediate_size=mlp_width,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=64,
                rms_norm_eps=1e-5, max_position_embeddings=8192, rope_theta=1e5) | changes  # fmt: skip


def _published(
    kind: str, text: dict[str, Any], vision: dict[str, Any], merge: int, image: int, stop: int, *, tied: bool = False
) -> dict[str, Any]:
    return dict(model_type=kind, text_config=text, vision_config=vision, scale_factor=merge, image_token_id=image,
                eos_token_id=stop, tie_word_embeddings=tied)  # fmt: skip


_135M, _360M = _smollm(576, 1536, 30, 9, 3), _smollm(960, 2560, 32, 15, 5)
_1_7B = _smollm(2048, 8192, 24, 32, 32, rope_theta=130000.0)
_IDS = (49190, 49279)
PUBLISHED: dict[str, dict[str, Any]] = {
    "smolvlm-256m": _published("idefics3", _135M, _BASE, 4, *_IDS),
    "smolvlm-500m": _published("idefics3", _360M, _BASE, 4, *_IDS),
    "smolvlm-2.2b": _published(
        "idefics3", _1_7B | dict(vocab_size=49155, max_position_embeddings=16384, rope_theta=273768.0),
        _SO400M | dict(image_size=384), 3, 49153, 49154),
    "smolvlm2-256m": _published("smolvlm", _135M, _BASE, 4, *_IDS),
    "smolvlm2-500m": _published("smolvlm", _360M, _BASE, 4, *_IDS),
    "smolvlm2-2.2b": _published("smolvlm", _1_7B, _SO400M | dict(image_size=384), 3, *_IDS),
    "idefics3-8b": _published(
        "idefics3", dict(TEXT["llama-3.1-8b"], vocab_size=128259), _SO400M | dict(image_size=364), 2, 128257, 128258),
    "granite-docling-258m": _published(
        "idefics3", _135M | dict(vocab_size=100352), _BASE, 4, 100270, 100257, tied=True),
}  # fmt: skip
