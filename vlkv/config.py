"""What a model is: frozen, hashable configs read from a Hugging Face `config.json`.

A field that changes the answer and that we do not honour is refused by name; nothing is silently ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.errors import InputError

# The class defaults of transformers, which sparse configs (llava-1.5-hf) leave out.
_DECODER_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                  num_attention_heads=32, rms_norm_eps=1e-6, max_position_embeddings=2048, eos_token_id=2),
    "mistral": dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-6,
                    max_position_embeddings=131072, sliding_window=4096, eos_token_id=2),
    "qwen2": dict(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
                  num_attention_heads=32, num_key_value_heads=32, rms_norm_eps=1e-6,
                  max_position_embeddings=32768, use_sliding_window=False),
}  # fmt: skip
_CLIP_DEFAULTS: dict[str, Any] = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                      num_attention_heads=12, image_size=224, patch_size=32, num_channels=3,
                                      hidden_act="quick_gelu", layer_norm_eps=1e-5)  # fmt: skip

TEXT_FAMILIES = ("llama", "mistral", "qwen2")
FAMILIES = ("llava", *TEXT_FAMILIES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-shaped decoder: RMSNorm, RoPE, grouped-query attention, gated MLP."""

    vocab_size: int
    width: int  # D
    mlp_width: int
    layers: int  # L
    heads: int  # N
    kv_heads: int  # K
    head_dim: int  # H
    norm_eps: float
    rope_theta: float
    max_positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    tied: bool = False  # the output head is the embedding table

    @classmethod
    def from_hf(cls, family: str, raw: Mapping[str, Any]) -> DecoderConfig:
        """Reads the decoder's part of a `config.json`; raises InputError for what we do not honour."""
        c = {**_DECODER_DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None}}
        if raw.get("sliding_window", 0) is None:
            c["sliding_window"] = None
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        _require("rope type", kind, "default")
        for field in rope:
            if field not in ("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings"):
                raise InputError(f"config.json: rope_parameters.{field} is not supported")
        for field in ("partial_rotary_factor", "layer_types"):
            supported = {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * c["num_hidden_layers"]}
            _require(field, c.get(field, supported[field]), supported[field])
        _require("hidden_act", c.get("hidden_act", "silu"), "silu")
        _require("mlp_bias", bool(c.get("mlp_bias", False)), False)
        if family == "mistral" or c.get("use_sliding_window"):
            _require("sliding_window", c.get("sliding_window"), None)
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "max_position_embeddings"):  # fmt: skip
            _positive(field, c[field])
        heads = c["num_attention_heads"]
        kv_heads = _positive("num_key_value_heads", c.get("num_key_value_heads", heads))
        head_dim = _positive("head_dim", c.get("head_dim", c["hidden_size"] // heads))
        if heads % kv_heads or head_dim % 2:
            raise InputError(f"config.json: {heads} heads, {kv_heads} key heads of {head_dim} channels: key heads must "
                             "divide the heads, and channels be even")  # fmt: skip
        bias = bool(c.get("attention_bias", False))
        return cls(
            vocab_size=c["vocab_size"],
            width=c["hidden_size"],
            mlp_width=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=c["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", c.get("rope_theta", 10000.0))),
            max_positions=c["max_position_embeddings"],
            qkv_bias=family == "qwen2" or bias,
            out_bias=family != "qwen2" and bias,
            tied=bool(c.get("tie_word_embeddings", False)),
        )


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
        _require("vision_config.model_type", vision.get("model_type", "clip_vision_model"), "clip_vision_model")
        c = {**_CLIP_DEFAULTS, **{k: v for k, v in vision.items() if v is not None}}
        _require("vision_config.hidden_act", c["hidden_act"], "quick_gelu")
        _require("vision_config.num_channels", c["num_channels"], 3)
        for field in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size",
                      "patch_size"):  # fmt: skip
            _positive(f"vision_config.{field}", c[field])
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `vision` and `image_token` are None for a family without a tower."""

    family: str
    decoder: DecoderConfig
    vision: ClipConfig | None = None
    image_token: int | None = None
    projector_bias: bool = True
    stop: tuple[int, ...] = ()  # ids that end a sequence

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads `config.json` and, where there is one, `generation_config.json` (for the stop ids).

        Raises:
            InputError: an unsupported `model_type`, or a field that we do not honour.
        """
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise InputError(f"config.json: model_type={family!r} is not supported (supported: {', '.join(FAMILIES)})")
        if raw.get("quantization_config"):
            raise InputError("config.json: quantization_config: quantised checkpoints are not supported; "
                             "use the original weights")  # fmt: skip
        text = dict(raw if family in TEXT_FAMILIES else raw.get("text_config") or {})
        text_family = text.get("model_type", "llama")
        if text_family not in TEXT_FAMILIES:
            raise InputError(f"config.json: text_config.model_type={text_family!r} is not supported "
                             f"(supported: {', '.join(TEXT_FAMILIES)})")  # fmt: skip
        if "tie_word_embeddings" in raw:  # transformers reads the outer field
            text["tie_word_embeddings"] = raw["tie_word_embeddings"]
        default = _DECODER_DEFAULTS[text_family].get("eos_token_id")
        stop = (generation or {}).get("eos_token_id", text.get("eos_token_id", raw.get("eos_token_id", default)))
        stop = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
        if not all(isinstance(token, int) for token in stop):
            raise InputError(f"config.json: eos_token_id={stop!r} must be a token id or a list of them")
        decoder = DecoderConfig.from_hf(text_family, text)
        if family in TEXT_FAMILIES:
            return cls(family=family, decoder=decoder, stop=stop)
        _require("projector_hidden_act", raw.get("projector_hidden_act", "gelu"), "gelu")
        return cls(
            family=family,
            decoder=decoder,
            vision=ClipConfig.from_hf(raw),
            image_token=raw.get("image_token_index", raw.get("image_token_id", 32000)),
            projector_bias=raw.get("multimodal_projector_bias", True),
            stop=stop,
        )


def _require(field: str, value: object, supported: object) -> None:
    if value != supported:
        raise InputError(f"config.json: {field}={value!r} is not supported (only {supported!r})")


def _positive(field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: {field}={value!r} must be a whole number of at least 1")
    return value
