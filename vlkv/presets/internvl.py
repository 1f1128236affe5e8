"""InternVL-Chat-V1.5 and InternVL2 (OpenGVLab/..., the originals) and InternVL3 (OpenGVLab/InternVL3-*-hf)."""

from __future__ import annotations

from typing import Any

from vlkv.presets.text import QWEN2

_VIT_300M = dict(model_type="intern_vit_6b", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                 num_attention_heads=16, image_size=448, patch_size=14, qkv_bias=True, qk_normalization=False,
                 norm_type="layer_norm")  # fmt: skip
_VIT_6B = dict(model_type="intern_vit_6b", hidden_size=3200, intermediate_size=12800, num_hidden_layers=45,
               num_attention_heads=25, image_size=448, patch_size=14, qkv_bias=False, qk_normalization=True,
               norm_type="rms_norm")  # fmt: skip
# Of Phi-3-mini-128k-instruct as it first came out, from which the 4B was trained; without their float32 noise.
_SHORT = [1.05, 1.05, 1.05, 1.1, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.5, *[2.0] * 21, 2.05, 2.05, 2.05, 2.1, 2.1, 2.1,
          2.15, 2.15, 2.35, 2.55, 2.6, 2.6, 2.75, 2.85, 2.85, 2.95]  # fmt: skip
_LONG = [1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58,
         15.66, 15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77,
         59.92, 61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81]  # fmt: skip
_PHI3_MINI = dict(model_type="phi3", vocab_size=32020, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32,
                  num_attention_heads=32, num_key_value_heads=32, rms_norm_eps=1e-5, rope_theta=1e4,
                  max_position_embeddings=131072, original_max_position_embeddings=4096, sliding_window=262144,
                  rope_scaling=dict(type="su", short_factor=_SHORT, long_factor=_LONG),
                  tie_word_embeddings=False)  # fmt: skip


def _internlm2(factor: float = 2.0, **sizes: int) -> dict[str, Any]:
    return dict(model_type="internlm2", vocab_size=92553, num_key_value_heads=8, max_position_embeddings=32768,
                rope_theta=1e6, rope_scaling=dict(type="dynamic", factor=factor), bias=False, rms_norm_eps=1e-5,
                tie_word_embeddings=False) | sizes  # fmt: skip


_INTERNLM2_20B = _internlm2(3.0, hidden_size=6144, intermediate_size=16384, num_hidden_layers=48,
                            num_attention_heads=48)  # fmt: skip


def _chat(vision: dict[str, Any], text: dict[str, Any], template: str) -> dict[str, Any]:
    """The originals."""
    return dict(model_type="internvl_chat", vision_config=vision, llm_config=text, template=template, select_layer=-1,
                ps_version="v2", downsample_ratio=0.5, force_image_size=448, dynamic_image_size=True,
                use_thumbnail=True, min_dynamic_patch=1, max_dynamic_patch=12)  # fmt: skip


def _internvl3(text: dict[str, Any]) -> dict[str, Any]:
    """InternVL3-*-hf: the tower with 300M under transformers' names."""
    vision = dict(model_type="internvl_vision", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                  num_attention_heads=16, image_size=[448, 448], patch_size=[14, 14], attention_bias=True,
                  use_qk_norm=False, norm_type="layer_norm", layer_norm_eps=1e-6)  # fmt: skip
    text = text | dict(vocab_size=151674, rope_scaling=dict(rope_type="dynamic", factor=2.0), sliding_window=None,
                       tie_word_embeddings=False)  # fmt: skip
    return dict(model_type="internvl", image_token_id=151667, downsample_ratio=0.5, projector_hidden_act="gelu",
                vision_feature_layer=-1, vision_feature_select_strategy="default", tie_word_embeddings=False,
                text_config=text, vision_config=vision)  # fmt: skip


RAW: dict[str, dict[str, Any]] = {
    "internvl-1.5-26b": _chat(_VIT_6B, _INTERNLM2_20B, "internlm2-chat"),
    "internvl2-1b": _chat(_VIT_300M, QWEN2["0.5b"] | dict(vocab_size=151655, tie_word_embeddings=False), "Hermes-2"),
    "internvl2-2b": _chat(_VIT_300M, _internlm2(hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
                                                num_attention_heads=16), "internlm2-chat"),
    "internvl2-4b": _chat(_VIT_300M, _PHI3_MINI, "phi3-chat"),
    "internvl2-8b": _chat(_VIT_300M, _internlm2(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                                num_attention_heads=32), "internlm2-chat"),
    "internvl2-26b": _chat(_VIT_6B, _INTERNLM2_20B, "internlm2-chat"),
    "internvl3-1b": _internvl3(QWEN2["0.5b"]),
    "internvl3-2b": _internvl3(QWEN2["1.5b"]),
    "internvl3-8b": _internvl3(QWEN2["7b"]),
}  # fmt: skip
# What the originals leave to the tokenizer.
_INTERNLM2_ADDED = {"<|im_end|>": 92542, "<IMG_CONTEXT>": 92546}
ADDED: dict[str, dict[str, int]] = {
    **dict.fromkeys(("internvl-1.5-26b", "internvl2-2b", "internvl2-8b", "internvl2-26b"), _INTERNLM2_ADDED),
    "internvl2-1b": {"<|im_end|>": 151645, "<IMG_CONTEXT>": 151648},
    "internvl2-4b": {"<|end|>": 32007, "<IMG_CONTEXT>": 32013},
}
