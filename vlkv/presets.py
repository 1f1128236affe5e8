"""Published models by name, as configs: `vlkv.presets["llava-1.5-7b"]`, for planning and for timing without weights.

    params = vlkv.init(vlkv.presets["llava-1.5-7b"], jax.random.key(0), mesh, dtype=jnp.bfloat16)

Each is the part that matters of the `config.json` as published, read as a folder's would be. A family adds its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from vlkv.config import FAMILIES, ModelConfig
from vlkv.errors import InputError

_CLIP_LARGE = dict(model_type="clip_vision_model", hidden_size=1024, intermediate_size=4096, num_hidden_layers=24,
                   num_attention_heads=16, image_size=336, patch_size=14)  # fmt: skip
_VICUNA_13B = dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
                   num_key_value_heads=40)  # fmt: skip


def _llava(**text: Any) -> dict[str, Any]:
    """llava-hf/llava-1.5-*-hf; what `text_config` leaves out is Llama's default, 7B."""
    text = dict(model_type="llama", max_position_embeddings=4096, rms_norm_eps=1e-5, vocab_size=32064) | text
    return dict(model_type="llava", image_token_index=32000, projector_hidden_act="gelu", tie_word_embeddings=False,
                vision_feature_layer=-2, vision_feature_select_strategy="default", text_config=text,
                vision_config=_CLIP_LARGE)  # fmt: skip


def _llava_next(**text: Any) -> dict[str, Any]:
    """llava-hf/llava-v1.6-*-hf."""
    return _llava(**text) | dict(
        model_type="llava_next",
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        use_image_newline_parameter=True,
    )


def _llava_onevision(text: dict[str, Any]) -> dict[str, Any]:
    """llava-hf/llava-onevision-qwen2-*-ov-hf."""
    sides = range(384, 2305, 384)
    return dict(model_type="llava_onevision", image_token_index=151646, video_token_index=151647,
                projector_hidden_act="gelu", vision_feature_layer=-1, vision_feature_select_strategy="full",
                vision_aspect_ratio="anyres_max_9", image_grid_pinpoints=[[h, w] for h in sides for w in sides],
                tie_word_embeddings=text["tie_word_embeddings"], text_config=text,
                vision_config=dict(model_type="siglip_vision_model", hidden_size=1152, intermediate_size=4304,
                                   num_hidden_layers=26, num_attention_heads=16, image_size=384, patch_size=14,
                                   vision_use_head=False))  # fmt: skip


def _qwen2_vl(text: dict[str, Any]) -> dict[str, Any]:
    """Qwen/Qwen2-VL-*-Instruct."""
    return text | dict(model_type="qwen2_vl", rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
                       image_token_id=151655, video_token_id=151656,
                       vision_config=dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, in_chans=3,
                                          hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2,
                                          temporal_patch_size=2))  # fmt: skip


def _qwen2_5_vl(text: dict[str, Any]) -> dict[str, Any]:
    """Qwen/Qwen2.5-VL-*-Instruct."""
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3,
                  out_hidden_size=text["hidden_size"], patch_size=14, spatial_merge_size=2, temporal_patch_size=2,
                  window_size=112, fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2)  # fmt: skip
    return _qwen2_vl(text) | dict(model_type="qwen2_5_vl", max_position_embeddings=128000, vision_config=vision)


def _llama(**sizes: Any) -> dict[str, Any]:
    return dict(model_type="llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
                rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False) | sizes  # fmt: skip


def _qwen2(**sizes: Any) -> dict[str, Any]:
    return dict(model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False, sliding_window=32768,
                max_position_embeddings=32768, eos_token_id=151645) | sizes  # fmt: skip


_QWEN2 = {
    "0.5b": _qwen2(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                   num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "1.5b": _qwen2(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                   num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "3b": _qwen2(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "7b": _qwen2(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                 num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip
# Instruct, v0.2: the first one's sliding window is not supported.
_MISTRAL = dict(model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, rms_norm_eps=1e-5, rope_theta=1e6,
                max_position_embeddings=32768, sliding_window=None, eos_token_id=2,
                tie_word_embeddings=False)  # fmt: skip
_RAW: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": _llava(),
    "llava-1.5-13b": _llava(**_VICUNA_13B),
    "llava-next-vicuna-7b": _llava_next(),
    "llava-next-vicuna-13b": _llava_next(**_VICUNA_13B),
    "llava-next-mistral-7b": _llava_next(**_MISTRAL | dict(vocab_size=32064)),
    "llava-onevision-0.5b": _llava_onevision(_QWEN2["0.5b"] | dict(vocab_size=152000)),
    "llava-onevision-7b": _llava_onevision(_QWEN2["7b"] | dict(vocab_size=152128)),
    "qwen2-vl-2b": _qwen2_vl(_QWEN2["1.5b"]),
    "qwen2-vl-7b": _qwen2_vl(_QWEN2["7b"]),
    "qwen2.5-vl-3b": _qwen2_5_vl(_QWEN2["3b"]),
    "qwen2.5-vl-7b": _qwen2_5_vl(_QWEN2["7b"]),
    "vicuna-1.5-7b": _llama(),
    "vicuna-1.5-13b": _llama(**_VICUNA_13B),
    "llama-3-8b": _llama(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, rope_theta=5e5,
                         max_position_embeddings=8192, bos_token_id=128000, eos_token_id=128009),
    "mistral-7b": _MISTRAL,
    **{f"qwen2-{size}": _QWEN2[size] for size in ("0.5b", "1.5b", "7b")},
}  # fmt: skip


class Presets:
    """Configs by name, read when they are asked for."""

    def __init__(self, raw: Mapping[str, dict[str, Any]]) -> None:
        self.raw = raw

    def __getitem__(self, name: str) -> ModelConfig:
        """The config; InputError for a name that is not there."""
        if name not in self.raw:
            near = difflib.get_close_matches(str(name), self.raw, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(self.raw)}"
            raise InputError(f"no preset {name!r}: {hint}")
        return ModelConfig.from_hf(self.raw[name])

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


presets = Presets({name: raw for name, raw in _RAW.items() if raw["model_type"] in FAMILIES})
