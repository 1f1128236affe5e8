"""A SigLIP tower, as LLaVA-OneVision and LLaVA-Video use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.errors import InputError

# What a LLaVA-OneVision config stands for where it says nothing, then the class defaults of transformers.
_ONEVISION: dict[str, Any] = dict(hidden_size=1152, intermediate_size=4304, patch_size=14, image_size=384,
                                  num_hidden_layers=26, num_attention_heads=16)  # fmt: skip
_DEFAULTS: dict[str, Any] = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                                 image_size=224, patch_size=16, num_channels=3, hidden_act="gelu_pytorch_tanh",
                                 layer_norm_eps=1e-6)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiglipConfig:
    """A SigLIP vision tower; `feature_layer` counts as transformers does (-1: after the last block)."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    feature_layer: int

    @property
    def grid(self) -> int:
        """Patches per side; pixels that fill no patch are cut off (384 = 27 x 14 + 6)."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Vision tokens that one image becomes: there is no class token."""
        return self.grid**2

    @property
    def blocks(self) -> int:
        """Blocks that run: those up to the feature layer."""
        return self.feature_layer if self.feature_layer >= 0 else self.layers + 1 + self.feature_layer

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> SiglipConfig:
        """Reads a `config.json` (the whole of it: the feature layer stands outside vision_config)."""
        vision = {key: value for key, value in (raw.get("vision_config") or _ONEVISION).items() if value is not None}
        require("vision_config.model_type", vision.get("model_type", "siglip_vision_model"), "siglip_vision_model")
        c = {**_DEFAULTS, **vision}
        require("vision_config.hidden_act", c["hidden_act"], "gelu_pytorch_tanh")
        require("vision_config.num_channels", c["num_channels"], 3)
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size",
                      "patch_size"):  # fmt: skip
            positive(f"vision_config.{field}", c[field])
        if c["image_size"] < c["patch_size"] or c["hidden_size"] % c["num_attention_heads"]:
            raise InputError("config.json: vision_config: an image must hold a patch, heads divide the hidden_size")
        layer = raw.get("vision_feature_layer", -1)
        if not isinstance(layer, int) or not -c["num_hidden_layers"] - 1 <= layer <= c["num_hidden_layers"]:
            raise InputError(f"config.json: vision_feature_layer={layer!r} is not supported: one layer index")
        # "default" would drop the first token, which here is a patch.
        require("vision_feature_select_strategy", raw.get("vision_feature_select_strategy", "full"), "full")
        return cls(
            width=c["hidden_size"],
            mlp_width=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=c["num_attention_heads"],
            image_size=c["image_size"],
            patch_size=c["patch_size"],
            norm_eps=c["layer_norm_eps"],
            feature_layer=layer,
        )
