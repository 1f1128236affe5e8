"""Qwen2-VL and Qwen2.5-VL: a tower at native resolution and a Qwen2 decoder with M-RoPE."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vlkv.config import Raw, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.qwen2_vl.inputs import NativeResolutionConfig
from vlkv.families.qwen2_vl.tower import Qwen2VisionConfig
from vlkv.families.text.config import read_stop
from vlkv.families.text.kinds import Kind
from vlkv.processing.templates import chatml
from vlkv.towers.native import SIZES, check_decoder, read_sizes, tower_fields

DECODER = Kind(qkv_bias=True, windows="typed", defaults=dict(
    vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
    num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=32768, rope_theta=1e6, use_sliding_window=False,
    sliding_window=4096, max_window_layers=80,
))  # fmt: skip
# The content of a message in a prompt.
CONTENT = (
    "{% for item in message.content %}"
    "{% if item.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif item.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ item.text }}{% endif %}{% endfor %}"
)
# Class defaults in transformers, by family.
_TOWER: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(depth=32, embed_dim=1280, mlp_ratio=4, num_heads=16, hidden_size=3584, patch_size=14,
                     spatial_merge_size=2, temporal_patch_size=2, hidden_act="quick_gelu"),
    "qwen2_5_vl": dict(depth=32, hidden_size=3584, intermediate_size=3420, num_heads=16, out_hidden_size=3584,
                       patch_size=14, spatial_merge_size=2, temporal_patch_size=2, hidden_act="silu", window_size=112,
                       fullatt_block_indexes=(7, 15, 23, 31), tokens_per_second=4),
}  # fmt: skip


class Qwen2VlConfig(NativeResolutionConfig):
    """Qwen2-VL and Qwen2.5-VL, which differ in their towers."""

    prompt_format = chatml(CONTENT, "You are a helpful assistant.")  # that of the published checkpoints

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        family = raw["model_type"]
        nested = raw.get("text_config")
        part = dict(raw if nested is None else nested)  # flat in transformers 4, nested in 5
        if part.get("model_type") != family:
            require("text_config.model_type", part.get("model_type", f"{family}_text"), f"{family}_text")
        part["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings") or part.get("tie_word_embeddings"))
        decoder = DECODER.read(part)
        vision = _read_tower(family, raw.get("vision_config") or {})
        check_decoder(decoder, vision.out_width)
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", default=151655),
            "video_token": token_id(raw, "video_token_id", default=151656),
            "stop": read_stop(raw, 151645),
        }


def _read_tower(family: str, raw: Raw) -> Qwen2VisionConfig:
    c, where = tower_fields(raw, _TOWER[family]), "vision_config."
    # transformers 4 wrote "in_chans"
    require_all(c, {"hidden_act": _TOWER[family]["hidden_act"], "in_channels": 3, "in_chans": 3}, where)
    own = _qwen2_vl(c) if family == "qwen2_vl" else _qwen2_5_vl(c)
    return Qwen2VisionConfig(activation=c["hidden_act"], **own)


def _qwen2_vl(c: Raw) -> dict[str, Any]:
    names = {ours: theirs for ours, theirs in SIZES.items() if ours != "mlp_width"}
    # Here `hidden_size` is the decoder's width.
    sizes = read_sizes(c, names | {"width": "embed_dim", "out_width": "hidden_size"})
    return sizes | dict(mlp_width=int(sizes["width"] * c["mlp_ratio"]), gated=False, norm="layer_norm")


def _qwen2_5_vl(c: Raw) -> dict[str, Any]:
    sizes = read_sizes(c, SIZES)
    side = sizes["patch_size"] * sizes["merge"]  # pixels
    if positive("vision_config.window_size", c["window_size"]) % side:
        raise InputError(f"config.json: vision_config.window_size={c['window_size']} must be a multiple of {side}")
    full = tuple(c["fullatt_block_indexes"])
    if not all(isinstance(block, int) and block >= 0 for block in full):
        raise InputError(f"config.json: vision_config.fullatt_block_indexes={full!r} must be indices of blocks")
    return sizes | dict(gated=True, norm="rms_norm", window=c["window_size"] // side, full=full,
                        tokens_per_second=float(c["tokens_per_second"]))  # fmt: skip
