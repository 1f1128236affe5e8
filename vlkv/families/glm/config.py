"""Config of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, and their published sizes."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vlkv.config import Raw, number, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.glm.inputs import VideoMarksConfig
from vlkv.families.glm.tower import GlmVisionConfig
from vlkv.families.text.config import read_stop, tied_by_either
from vlkv.families.text.kinds import Kind
from vlkv.towers.native import SIZES, check_decoder, read_sizes, tower_fields

_MOE = "glm4v_moe"
# Class defaults in transformers, by `model_type`.
_GLM4V = Kind(names="glm", qkv_bias=True, partial=True, neighbours=True, sandwich_norms=True, defaults=dict(
    vocab_size=151552, hidden_size=4096, intermediate_size=13696, num_hidden_layers=40, num_attention_heads=32,
    num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=32768))  # fmt: skip
_GLM_OCR = Kind(names="glm", partial=True, neighbours=True, sandwich_norms=True, defaults=dict(
    vocab_size=59392, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=8, rms_norm_eps=1e-5, max_position_embeddings=131072))  # fmt: skip
_GLM4V_TOWER: dict[str, Any] = dict(
    depth=24, hidden_size=1536, hidden_act="silu", attention_bias=False, num_heads=12, in_channels=3, image_size=336,
    patch_size=14, rms_norm_eps=1e-5, spatial_merge_size=2, temporal_patch_size=2, out_hidden_size=4096,
    intermediate_size=13696,
)  # fmt: skip
_GLM_OCR_TOWER = _GLM4V_TOWER | dict(hidden_size=1024, attention_bias=True, num_heads=16, out_hidden_size=1536,
                                     intermediate_size=4096)  # fmt: skip
_TOKENS = {
    "glm4v": dict(image_token_id=151343, video_start_token_id=151341, video_end_token_id=151342),
    "glm46v": dict(image_token_id=151343, video_start_token_id=151361, video_end_token_id=151362),
    "glm_ocr": dict(image_token_id=59280, video_start_token_id=59258, video_end_token_id=59259),
}
_END = {"glm4v": 151329, "glm46v": 151329, "glm_ocr": 59246}  # <|endoftext|>


def has_experts(raw: Raw) -> bool:
    """Whether this is the form of GLM-4.5V and GLM-4.6V (106B) with experts, which `GlmConfig.read` refuses by name."""
    return raw.get("model_type") == _MOE


class GlmConfig(VideoMarksConfig):
    """GLM-4.1V and GLM-4.6V-Flash (`glm4v`, `glm46v`), and GLM-OCR (`glm_ocr`), which differ in sizes and norms."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        family, part = raw["model_type"], dict(raw.get("text_config") or {})
        if str(part.get("model_type")).startswith(_MOE) or "n_routed_experts" in part:
            raise InputError(f"config.json: {_MOE} (GLM-4.5V, GLM-4.6V) is not supported, because its router has a "
                             "correction bias and groups; GLM-4.6V-Flash is supported")  # fmt: skip
        ocr = family == "glm_ocr"
        name = "glm_ocr_text" if ocr else "glm4v_text"
        require("text_config.model_type", part.get("model_type", name), name)
        tied = raw if family == "glm46v" else tied_by_either(raw)
        part["tie_word_embeddings"] = bool(tied.get("tie_word_embeddings"))
        if ocr:
            require_all(part, {"attention_bias": False}, "text_config.")
        decoder = (_GLM_OCR if ocr else _GLM4V).read(part)
        if not ocr and decoder.head_dim * decoder.heads != decoder.width:  # transformers uses head_dim in RoPE only
            raise InputError(f"config.json: text_config.head_dim={decoder.head_dim}: {decoder.heads} heads must have "
                             f"{decoder.width} channels together")  # fmt: skip
        vision = _read_tower(raw.get("vision_config") or {}, ocr=ocr)
        check_decoder(decoder, vision.out_width)
        image, start, end = (token_id(raw, field, default=token) for field, token in _TOKENS[family].items())
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": image,
            "wiring": (start, end),
            "stop": read_stop(raw, _END[family]),
        }


def _read_tower(raw: Raw, *, ocr: bool) -> GlmVisionConfig:
    """The tower of `vision_config`. That of GLM-OCR has no table of positions; its queries and keys are normalised."""
    c, where = tower_fields(raw, _GLM_OCR_TOWER if ocr else _GLM4V_TOWER), "vision_config."
    names = ("glm_ocr_vision", "glm_ocr") if ocr else ("glm4v_vision", "glm4v")
    require(where + "model_type", c.get("model_type", names[0]), *names)
    require_all(c, {"hidden_act": "silu", "in_channels": 3, "temporal_patch_size": 2}, where)
    require(where + "attention_bias", c["attention_bias"], True, False)
    sizes, bias, eps = read_sizes(c, SIZES), c["attention_bias"], number(where + "rms_norm_eps", c["rms_norm_eps"])
    if positive(where + "image_size", c["image_size"]) < c["patch_size"]:
        raise InputError(f"config.json: {where}image_size={c['image_size']} must be at least patch_size")
    inner, out = sizes["mlp_width"], sizes["out_width"]
    # The MLPs of the blocks of GLM-4.1V have `out_hidden_size` channels, and its merger has `intermediate_size`.
    own = sizes | dict(mlp_width=inner if ocr else out, merger_width=3 * out if ocr else inner)
    return GlmVisionConfig(
        **own, activation="silu", norm="rms_norm", norm_eps=eps, gated=True, qkv_bias=bias, out_bias=ocr and bias,
        mlp_bias=ocr and bias, qk_norm_eps=eps if ocr else None,
        table=None if ocr else c["image_size"] // c["patch_size"],
    )  # fmt: skip
