"""InternVL2.5, InternVL3 and InternVL3.5 in transformers' form."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from typing_extensions import override

from vlkv.config import Raw, filled, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.internvl.conversations import Conversation
from vlkv.families.internvl.inputs import TilesConfig
from vlkv.families.text.config import read_decoder
from vlkv.processing.templates import chatml
from vlkv.towers.vit import VitConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVitConfig(VitConfig):
    """InternViT: 300M (LayerNorm) or 6B (RMSNorm, normalised queries and keys); no norm follows the last block."""

    norm: str = dataclasses.field()  # "layer_norm" or "rms_norm"
    qkv_bias: bool = dataclasses.field()
    qk_norm_eps: float | None = None
    feature_layer: int = -1

    class_token = True
    scaled = True
    defaults: ClassVar = dict(
        model_type="internvl_vision", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
        num_attention_heads=16, image_size=448, patch_size=14, norm_type="layer_norm", layer_norm_eps=1e-6,
        attention_bias=False, use_qk_norm=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require("vision_config.norm_type", self.norm, "layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVlWiring:
    """InternVL's own settings.

    Attributes:
        merge: patches per side that become one vision token.
        min_tiles: least number of tiles of an image, without the thumbnail.
        max_tiles: greatest number of tiles of an image, without the thumbnail.
        thumbnail: whether an image that is cut into several tiles is followed by a thumbnail of the whole.
        conversation: the prompt format; None: the checkpoint has a chat template.
    """

    merge: int
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    conversation: Conversation | None = None

    @classmethod
    def of(cls, raw: Raw, vision: VitConfig, **settings: Any) -> InternVlWiring:
        """The settings; InputError unless the inverse of `downsample_ratio` divides the patches per side."""
        ratio = raw.get("downsample_ratio", 0.5)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or (1 / ratio) % 1 or vision.grid % int(1 / ratio):
            raise InputError(f"config.json: downsample_ratio={ratio!r} must be 1/n, where n divides the "
                             f"{vision.grid} patches per side")  # fmt: skip
        return cls(merge=int(1 / ratio), **settings)


class InternVlConfig(TilesConfig):
    """An InternViT tower and any decoder."""

    prompt_format = chatml()  # without the system message of the authors' form, as transformers converts checkpoints

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require_all(raw, {"projector_hidden_act": "gelu", "vision_feature_select_strategy": "default"})
        tower = raw.get("vision_config") or {}
        require_all(tower, {"use_mean_pooling": True, "use_absolute_position_embeddings": True}, "vision_config.")
        c = filled(tower, InternVitConfig.defaults)
        vision = InternVitConfig.from_hf(
            tower, raw.get("vision_feature_layer", -1), norm=c["norm_type"], qkv_bias=bool(c["attention_bias"]),
            # transformers always uses the default epsilon for these norms and ignores layer_norm_eps
            qk_norm_eps=1e-6 if c["use_qk_norm"] else None,
        )  # fmt: skip
        return {
            "decoder": read_decoder({"tie_word_embeddings": True, **raw}, "qwen2"),  # the family's defaults
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", default=151667),
            "wiring": InternVlWiring.of(raw, vision),
        }
