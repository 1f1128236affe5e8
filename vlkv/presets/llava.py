"""LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision (llava-hf/...) and LLaVA-Video (lmms-lab/..., the original)."""

from __future__ import annotations

from typing import Any

from vlkv.presets.text import MISTRAL, QWEN2, VICUNA_13B

_CLIP_LARGE = dict(model_type="clip_vision_model", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                   num_attention_heads=16, image_size=336, patch_size=14)  # fmt: skip
_SIDES = range(384, 2305, 384)  # pixels
_TILES = [[height, width] for height in _SIDES for width in _SIDES]


def _llava(**text: Any) -> dict[str, Any]:
    """llava-1.5-*-hf; what `text_config` leaves out is Llama's default, 7B."""
    text = dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, vocab_size=32064) | text
    return dict(model_type="llava", image_token_index=32000, projector_hidden_act="gelu", tie_word_embeddings=False,
                vision_feature_layer=-2, vision_feature_select_strategy="default", text_config=text,
                vision_config=_CLIP_LARGE)  # fmt: skip


def _llava_next(**text: Any) -> dict[str, Any]:
    """llava-v1.6-*-hf."""
    return _llava(**text) | dict(
        model_type="llava_next",
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        use_image_newline_parameter=True,
    )


def _llava_onevision(text: dict[str, Any]) -> dict[str, Any]:
    """llava-onevision-qwen2-*-ov-hf."""
    return dict(model_type="llava_onevision", image_token_index=151646, video_token_index=151647,
                projector_hidden_act="gelu", vision_feature_layer=-1, vision_feature_select_strategy="full",
                vision_aspect_ratio="anyres_max_9", image_grid_pinpoints=_TILES,
                tie_word_embeddings=text["tie_word_embeddings"], text_config=text,
                vision_config=dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304,
                                   num_hidden_layers=26, num_attention_heads=16, image_size=384, patch_size=14,
                                   vision_use_head=False))  # fmt: skip


def _llava_video(text: dict[str, Any]) -> dict[str, Any]:
    """LLaVA-Video-*-Qwen2: the decoder's own config, and the tower by its name."""
    return text | dict(architectures=["LlavaQwenForCausalLM"], model_type="llava", image_token_index=151646,
                       mm_vision_tower="google/siglip-so400m-patch14-384", mm_projector_type="mlp2x_gelu",
                       mm_patch_merge_type="spatial_unpad", mm_spatial_pool_mode="bilinear",
                       mm_newline_position="grid", image_aspect_ratio="anyres_max_9",
                       image_grid_pinpoints=_TILES)  # fmt: skip


RAW: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": _llava(),
    "llava-1.5-13b": _llava(**VICUNA_13B),
    "llava-next-vicuna-7b": _llava_next(),
    "llava-next-vicuna-13b": _llava_next(**VICUNA_13B),
    "llava-next-mistral-7b": _llava_next(**MISTRAL | dict(vocab_size=32064)),
    "llava-onevision-0.5b": _llava_onevision(QWEN2["0.5b"] | dict(vocab_size=152000)),
    "llava-onevision-7b": _llava_onevision(QWEN2["7b"] | dict(vocab_size=152128)),
    "llava-video-7b": _llava_video(QWEN2["7b"]),
}
