"""A CLIP tower, as LLaVA's families use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.errors import InputError

# The class defaults of transformers.
_DEFAULTS: dict[str, Any] = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                      num_attention_heads=12, image_size=224, patch_size=32, num_channels=3,
                                      hidden_act="quick_gelu", layer_norm_eps=1e-5)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """A CLIP vision tower; `feature_layer` counts as transformers does (-2: before the last block)."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    norm_eps: float
    feature_layer: int
    keep_class_token: bool

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Vision tokens that one image becomes."""
        return self.grid**2 + int(self.keep_class_token)

    @property
    def blocks(self) -> int:
        """Blocks that run: those up to the feature layer."""
        return self.feature_layer if self.feature_layer >= 0 else self.layers + 1 + self.feature_layer

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ClipConfig:
        """Reads a llava `config.json` (the whole of it: the feature layer stands outside vision_config)."""
        vision = raw.get("vision_config") or {}
        require("vision_config.model_type", vision.get("model_type", "clip_vision_model"), "clip_vision_model")
        c = {**_DEFAULTS, **{k: v for k, v in vision.items() if v is not None}}
        require("vision_config.hidden_act", c["hidden_act"], "quick_gelu")
        require("vision_config.num_channels", c["num_channels"], 3)
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size",
                      "patch_size"):  # fmt: skip
            positive(f"vision_config.{field}", c[field])
        if c["image_size"] % c["patch_size"] or c["hidden_size"] % c["num_attention_heads"]:
            raise InputError("config.json: vision_config: patch_size must divide image_size, heads the hidden_size")
        layer = raw.get("vision_feature_layer", -2)
        if not isinstance(layer, int) or not -c["num_hidden_layers"] - 1 <= layer <= c["num_hidden_layers"]:
            raise InputError(f"config.json: vision_feature_layer={layer!r} is not supported: one layer index")
        strategy = raw.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise InputError(f"config.json: vision_feature_select_strategy={strategy!r} is neither default nor full")
        return cls(
            width=c["hidden_size"],
            mlp_width=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=c["num_attention_heads"],
            image_size=c["image_size"],
            patch_size=c["patch_size"],
            norm_eps=c["layer_norm_eps"],
            feature_layer=layer,
            keep_class_token=strategy == "full",
        )
