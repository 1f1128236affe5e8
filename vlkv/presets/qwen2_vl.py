"""Qwen2-VL and Qwen2.5-VL, the instruction-tuned ones."""

from __future__ import annotations

from typing import Any

from vlkv.presets.text import QWEN2


def _qwen2_vl(text: dict[str, Any]) -> dict[str, Any]:
    """Qwen/Qwen2-VL-*-Instruct."""
    return text | dict(model_type="qwen2_vl", rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
                       image_token_id=151655, video_token_id=151656,
                       vision_config=dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, in_chans=3,
                                          hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2,
                                          temporal_patch_size=2))  # fmt: skip


def _qwen2_5_vl(text: dict[str, Any], mlp_width: int = 3420) -> dict[str, Any]:
    """Qwen/Qwen2.5-VL-*-Instruct."""
    vision = dict(depth=32, hidden_size=1280, intermediate_size=mlp_width, num_heads=16, in_chans=3,
                  out_hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
                  window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2)  # fmt: skip
    return _qwen2_vl(text) | dict(model_type="qwen2_5_vl", max_position_embeddings=128000, vision_config=vision)


RAW: dict[str, dict[str, Any]] = {
    "qwen2-vl-2b": _qwen2_vl(QWEN2["1.5b"]),
    "qwen2-vl-7b": _qwen2_vl(QWEN2["7b"]),
    "qwen2-vl-72b": _qwen2_vl(QWEN2["72b"]),
    "qwen2.5-vl-3b": _qwen2_5_vl(QWEN2["3b"]),
    "qwen2.5-vl-7b": _qwen2_5_vl(QWEN2["7b"]),
    "qwen2.5-vl-72b": _qwen2_5_vl(QWEN2["72b"], mlp_width=3456),
}
