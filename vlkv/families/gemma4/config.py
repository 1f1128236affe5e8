"""Gemma 4 with images in transformers' form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from vlkv.config import Raw, filled, number, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.gemma4.inputs import PatchesConfig
from vlkv.families.gemma4.tower import Gemma4VisionConfig
from vlkv.families.text.config import read_decoder
from vlkv.towers.native import read_sizes

# Class defaults in transformers.
_TOWER: dict[str, Any] = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=16, num_attention_heads=12, num_key_value_heads=12,
    head_dim=64, patch_size=16, pooling_kernel_size=3, position_embedding_size=10240, rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
_SIZES = {"width": "hidden_size", "mlp_width": "intermediate_size", "layers": "num_hidden_layers",
          "heads": "num_attention_heads", "patch_size": "patch_size", "merge": "pooling_kernel_size",
          "table": "position_embedding_size"}  # fmt: skip
_REFUSED = {
    "audio": ("input_features", "audio_token_id", 258881),
    "video": ("pixel_values_videos", "video_token_id", 258884),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4Wiring:
    """The family's own settings.

    Attributes:
        tokens: the most vision tokens of an image.
        refused: kinds of inputs that are not supported: name, its array in a batch, and its token.
    """

    tokens: int
    refused: tuple[tuple[str, str, int], ...]


class Gemma4Config(PatchesConfig):
    """A tower at native resolution, and a decoder whose sliding layers may see an image in both directions."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        text, tokens = raw.get("text_config") or {}, raw.get("vision_soft_tokens_per_image")
        most = positive("vision_soft_tokens_per_image", 280 if tokens is None else tokens)
        if isinstance(text, dict):  # missing fields have the family's defaults
            require("text_config.model_type", text.get("model_type", "gemma4_text"), "gemma4_text")
            text = {"model_type": "gemma4_text", **text}
        decoder = read_decoder({"tie_word_embeddings": True, **raw, "text_config": text})
        both = isinstance(text, dict) and text.get("use_bidirectional_attention") == "vision"
        refused = ((kind, field, token_id(raw, name, default=token)) for kind, (field, name, token) in _REFUSED.items())
        return {
            "decoder": dataclasses.replace(decoder, image_block=most if both else 0, image_block_slides=both),
            "vision": _read_tower(raw.get("vision_config") or {}),
            "image_token": token_id(raw, "image_token_id", default=258880),
            "wiring": Gemma4Wiring(tokens=most, refused=tuple(refused)),
        }


def _read_tower(raw: object) -> Gemma4VisionConfig:
    if not isinstance(raw, Mapping):
        raise InputError(f"config.json: vision_config={raw!r} must be an object")
    c, where = filled(raw, _TOWER), "vision_config."
    sizes = read_sizes(c, _SIZES, theta=100.0)
    only = {"hidden_activation": _TOWER["hidden_activation"], "num_key_value_heads": sizes["heads"],
            "head_dim": sizes["width"] // sizes["heads"], "attention_bias": False,
            "model_type": "gemma4_vision"}  # fmt: skip
    require_all(c, only, where)
    return Gemma4VisionConfig(
        **sizes, norm_eps=number(f"{where}rms_norm_eps", c["rms_norm_eps"]),
        clipped=bool(c.get("use_clipped_linears")), standardised=bool(c.get("standardize")),
    )  # fmt: skip
