"""An InternViT tower: 300M (LayerNorm) or 6B (RMSNorm, normalised queries and keys)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.errors import InputError

# The class defaults, under transformers' names: of transformers' InternVLVisionConfig, and of the original's.
_DEFAULTS: dict[str, Any] = dict(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, image_size=448,
    patch_size=14, num_channels=3, hidden_act="gelu", norm_type="layer_norm", layer_norm_eps=1e-6,
    attention_bias=False, use_qk_norm=False,
)  # fmt: skip
_ORIGINAL_DEFAULTS: dict[str, Any] = dict(
    hidden_size=3200, intermediate_size=12800, num_hidden_layers=48, num_attention_heads=25, image_size=224,
    patch_size=14, num_channels=3, hidden_act="gelu", norm_type="rms_norm", layer_norm_eps=1e-6,
    qkv_bias=False, qk_normalization=True,
)  # fmt: skip
_NORMS = ("layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVitConfig:
    """An InternViT; `feature_layer` counts as transformers does (-1: behind the last block)."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    norm: str  # "layer_norm" or "rms_norm"
    norm_eps: float
    qkv_bias: bool
    qk_norm_eps: float | None = None  # None: queries and keys are not normalised
    feature_layer: int = -1

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Patches of one tile; the wiring merges them into fewer vision tokens."""
        return self.grid**2

    @property
    def blocks(self) -> int:
        """Blocks that run: those up to the feature layer."""
        return self.feature_layer if self.feature_layer >= 0 else self.layers + 1 + self.feature_layer

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any], feature_layer: object) -> InternVitConfig:
        """Reads transformers' `vision_config`.

        Raises:
            InputError: a field that we do not honour.
        """
        require("vision_config.model_type", vision.get("model_type", "internvl_vision"), "internvl_vision")
        for field, supported in (("use_mean_pooling", True), ("use_absolute_position_embeddings", True)):
            require(f"vision_config.{field}", vision.get(field, supported), supported)
        c = {**_DEFAULTS, **{k: v for k, v in vision.items() if v is not None}}
        # transformers leaves these norms at the default epsilon, whatever layer_norm_eps says
        return cls._read(c, feature_layer, qkv_bias=c["attention_bias"], qk_norm_eps=1e-6 if c["use_qk_norm"] else None)

    @classmethod
    def from_original(cls, vision: Mapping[str, Any], feature_layer: object) -> InternVitConfig:
        """Reads the `vision_config` of an original (`internvl_chat`) checkpoint.

        Raises:
            InputError: a field that we do not honour.
        """
        require("vision_config.model_type", vision.get("model_type", "intern_vit_6b"), "intern_vit_6b")
        c = {**_ORIGINAL_DEFAULTS, **{k: v for k, v in vision.items() if v is not None}}
        eps = c["layer_norm_eps"] if c["qk_normalization"] else None
        return cls._read(c, feature_layer, qkv_bias=c["qkv_bias"], qk_norm_eps=eps)

    @classmethod
    def _read(
        cls, c: dict[str, Any], feature_layer: object, *, qkv_bias: bool, qk_norm_eps: float | None
    ) -> InternVitConfig:
        require("vision_config.hidden_act", c["hidden_act"], "gelu")
        require("vision_config.num_channels", c["num_channels"], 3)
        if c["norm_type"] not in _NORMS:
            raise InputError(
                f"config.json: vision_config.norm_type={c['norm_type']!r} is neither of {', '.join(_NORMS)}"
            )
        for field in ("image_size", "patch_size"):
            c[field] = _square(field, c[field])
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            positive(f"vision_config.{field}", c[field])
        layers = c["num_hidden_layers"]
        if c["image_size"] % c["patch_size"] or c["hidden_size"] % c["num_attention_heads"]:
            raise InputError("config.json: vision_config: patch_size must divide image_size, heads the hidden_size")
        if not isinstance(feature_layer, int) or not -layers - 1 <= feature_layer <= layers:
            raise InputError(
                f"config.json: the vision feature layer {feature_layer!r} is not supported: one layer index"
            )
        return cls(
            width=c["hidden_size"],
            mlp_width=c["intermediate_size"],
            layers=layers,
            heads=c["num_attention_heads"],
            image_size=c["image_size"],
            patch_size=c["patch_size"],
            norm=c["norm_type"],
            norm_eps=c["layer_norm_eps"],
            qkv_bias=bool(qkv_bias),
            qk_norm_eps=qk_norm_eps,
            feature_layer=feature_layer,
        )


def _square(field: str, value: object) -> int:
    """One side of a size that may be written as two."""
    if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    return positive(f"vision_config.{field}", value)
