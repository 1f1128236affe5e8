"""The decoder's part of a config: sizes, rotation, and what differs between families of the Llama shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import positive, require
from vlkv.config.rope import RopeConfig
from vlkv.errors import InputError

# The class defaults of transformers, which sparse configs (llava-1.5-hf) leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                  num_attention_heads=32, rms_norm_eps=1e-6, max_position_embeddings=2048, eos_token_id=2),
    "mistral": dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                    num_attention_heads=32, num_key_value_heads=8, rms_norm_eps=1e-6,
                    max_position_embeddings=131072, sliding_window=4096, eos_token_id=2),
    "qwen2": dict(vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32,
                  num_attention_heads=32, num_key_value_heads=32, rms_norm_eps=1e-6,
                  max_position_embeddings=32768, use_sliding_window=False),
    "phi3": dict(vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
                 num_attention_heads=32, rms_norm_eps=1e-5, max_position_embeddings=4096,
                 original_max_position_embeddings=4096, eos_token_id=32000),
    "internlm2": dict(vocab_size=103168, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                      num_attention_heads=32, rms_norm_eps=1e-6, max_position_embeddings=2048, bias=True,
                      eos_token_id=2),
    "qwen2_vl": dict(vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80,
                     num_attention_heads=64, num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=32768,
                     rope_theta=1e6, use_sliding_window=False, eos_token_id=151645),
}  # fmt: skip
DEFAULTS["qwen2_5_vl"] = DEFAULTS["qwen2_vl"]
TEXT_FAMILIES = ("llama", "mistral", "qwen2", "phi3", "internlm2")
# Families whose tensors are fused or named in a way of their own; see checkpoints_convert/tables/decoder.py.
_SPELLINGS = ("phi3", "internlm2")


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
    max_positions: int
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    log_from: int | None = None  # log-n attention: queries grow with the logarithm of the position behind this one
    tied: bool = False  # the output head is the embedding table
    names: str = "llama"  # how the checkpoint spells the tensors: "llama", "phi3" or "internlm2"

    @classmethod
    def from_hf(cls, family: str, raw: Mapping[str, Any]) -> DecoderConfig:
        """Reads the decoder's part of a `config.json`; raises InputError for what we do not honour."""
        c = {**DEFAULTS[family], **{k: v for k, v in raw.items() if v is not None}}
        if raw.get("sliding_window", 0) is None:
            c["sliding_window"] = None
        for field in ("partial_rotary_factor", "layer_types"):
            supported = {"partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * c["num_hidden_layers"]}
            require(field, c.get(field, supported[field]), supported[field])
        require("hidden_act", c.get("hidden_act", "silu"), "silu")
        require("mlp_bias", bool(c.get("mlp_bias", False)), False)
        _require_no_window(family, c)
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "max_position_embeddings"):  # fmt: skip
            positive(field, c[field])
        heads = c["num_attention_heads"]
        kv_heads = positive("num_key_value_heads", c.get("num_key_value_heads", heads))
        head_dim = positive("head_dim", c.get("head_dim", c["hidden_size"] // heads))
        if heads % kv_heads or head_dim % 2:
            raise InputError(f"config.json: {heads} heads, {kv_heads} key heads of {head_dim} channels: key heads must "
                             "divide the heads, and channels be even")  # fmt: skip
        bias = bool(c.get("bias" if family == "internlm2" else "attention_bias", False))
        if family == "phi3":
            require("attention_bias", bias, False)
        return cls(
            vocab_size=c["vocab_size"],
            width=c["hidden_size"],
            mlp_width=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=c["rms_norm_eps"],
            max_positions=c["max_position_embeddings"],
            rope=RopeConfig.from_hf(c, head_dim),
            qkv_bias=family.startswith("qwen2") or bias,
            out_bias=not family.startswith("qwen2") and bias,
            tied=bool(c.get("tie_word_embeddings", False)),
            names=family if family in _SPELLINGS else "llama",
        )


def _require_no_window(family: str, c: Mapping[str, Any]) -> None:
    """A window that reaches as far as the model's positions (Phi-3's 262144) is not in use."""
    window = c.get("sliding_window")
    used = family in ("mistral", "phi3") or c.get("use_sliding_window")
    if used and not (isinstance(window, int) and window >= c["max_position_embeddings"]):
        require("sliding_window", window, None)
