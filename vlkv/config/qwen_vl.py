"""Qwen-VL and Qwen-VL-Chat (Bai et al. 2023): a ViT whose patches a resampler reads into a square of tokens.

The decoder has Qwen2's shape. Prompts are limited to the length that it was trained on (`seq_length`): up to there its
dynamic scaling of positions (NTK) does nothing. Its log-n attention acts on what is generated behind that length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.config.decoder import DecoderConfig
from vlkv.config.rope import RopeConfig
from vlkv.errors import InputError

# The class defaults of the authors' code.
_DEFAULTS: dict[str, Any] = dict(
    vocab_size=151936, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=22016,
    layer_norm_epsilon=1e-6, kv_channels=128, max_position_embeddings=8192, seq_length=2048, rotary_emb_base=10000,
    rotary_pct=1.0, scale_attn_weights=True, no_bias=True, use_dynamic_ntk=True, use_logn_attn=True,
    tie_word_embeddings=False, eos_token_id=151643,
)  # fmt: skip
_VISION_DEFAULTS: dict[str, Any] = dict(n_queries=256, output_dim=512, image_start_id=151857)
_RESAMPLER_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVitConfig:
    """Qwen-VL's tower and resampler."""

    width: int
    mlp_width: int
    layers: int
    heads: int
    image_size: int
    patch_size: int
    side: int  # tokens per side that an image becomes
    resampler_heads: int
    norm_eps: float = 1e-6

    @property
    def grid(self) -> int:
        """Patches per side."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Vision tokens that one image becomes."""
        return self.side**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVlConfig:
    """The rest."""

    side: int  # tokens per side that an image becomes


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    if not isinstance(raw.get("visual"), Mapping):
        raise InputError("config.json: visual is missing: of the first Qwen only Qwen-VL is supported")
    c = {**_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    for field in ("rotary_pct", "scale_attn_weights", "no_bias"):
        require(field, c[field], _DEFAULTS[field])
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                  "kv_channels", "max_position_embeddings", "seq_length"):  # fmt: skip
        positive(field, c[field])
    if c["kv_channels"] % 2 or c["intermediate_size"] % 2:
        raise InputError("config.json: kv_channels and intermediate_size must be even")
    visual = {**_VISION_DEFAULTS, **c["visual"]}
    vision = _vision(visual, c["hidden_size"])
    length, eos = c["seq_length"], c["eos_token_id"]
    return {
        "decoder": DecoderConfig(
            vocab_size=c["vocab_size"],
            width=c["hidden_size"],
            mlp_width=c["intermediate_size"] // 2,  # counted twice: gate and up
            layers=c["num_hidden_layers"],
            heads=c["num_attention_heads"],
            kv_heads=c["num_attention_heads"],
            head_dim=c["kv_channels"],
            norm_eps=c["layer_norm_epsilon"],
            max_positions=length if c["use_dynamic_ntk"] else c["max_position_embeddings"],
            rope=RopeConfig(theta=float(c["rotary_emb_base"])),
            qkv_bias=True,
            log_from=length if c["use_logn_attn"] else None,
            tied=bool(c["tie_word_embeddings"]),
        ),
        "vision": vision,
        "image_token": visual["image_start_id"] + 2,  # start, end, and the one that stands for each vision token
        "wiring": QwenVlConfig(side=vision.side),
        "stop": (eos, eos + 2),  # <|endoftext|>, and <|im_end|> of the conversation
    }


def _vision(c: Mapping[str, Any], width: int) -> QwenVitConfig:
    for field in ("image_size", "patch_size", "width", "layers", "heads", "n_queries", "output_dim"):
        positive(f"visual.{field}", c.get(field))
    require("visual.output_dim", c["output_dim"], width)
    side = round(c["n_queries"] ** 0.5)
    if side**2 != c["n_queries"] or c["output_dim"] % _RESAMPLER_HEAD_DIM or c["width"] % c["heads"]:
        raise InputError(
            f"config.json: visual: n_queries must be a square, output_dim a multiple of {_RESAMPLER_HEAD_DIM}, "
            "and width a multiple of heads"
        )
    if c["image_size"] % c["patch_size"]:
        raise InputError("config.json: visual: patch_size must divide image_size")
    return QwenVitConfig(
        width=c["width"],
        mlp_width=int(c["width"] * c["mlp_ratio"]),
        layers=c["layers"],
        heads=c["heads"],
        image_size=c["image_size"],
        patch_size=c["patch_size"],
        side=side,
        resampler_heads=c["output_dim"] // _RESAMPLER_HEAD_DIM,
    )
