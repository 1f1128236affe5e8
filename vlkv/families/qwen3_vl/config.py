"""Config of Qwen3-VL and its published sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from vlkv.config import Raw, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.qwen2_vl.config import CONTENT
from vlkv.families.qwen2_vl.inputs import NativeResolutionConfig
from vlkv.families.qwen3_vl.inputs import Qwen3VlPictures
from vlkv.families.qwen3_vl.tower import Qwen3VisionConfig
from vlkv.families.text.config import KINDS, read_stop, tied_by_either
from vlkv.families.text.kinds import Kind
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout, PictureKind
from vlkv.processing.templates import chatml
from vlkv.towers.native import SIZES, check_decoder, read_sizes, tower_fields

# Class defaults in transformers, by family.
_POSITIONS = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_DECODERS = {
    "qwen3_vl": Kind(names="qwen3", qk_norm=True, interleaved=True, defaults={**KINDS["qwen3"].defaults, **_POSITIONS}),
    "qwen3_vl_moe": Kind(names="qwen3_moe", qk_norm=True, interleaved=True, experts=True, normalised=True, defaults={
        **KINDS["qwen3_moe"].defaults, **_POSITIONS, "intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 16, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60}),
}  # fmt: skip
TOWER: dict[str, Any] = dict(
    depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=3584, patch_size=16,
    spatial_merge_size=2, temporal_patch_size=2, hidden_act="gelu_pytorch_tanh", num_position_embeddings=2304,
    deepstack_visual_indexes=(8, 16, 24),
)  # fmt: skip


class Qwen3VlConfig(NativeResolutionConfig):
    """Qwen3-VL with a dense decoder, or one with experts."""

    prompt_format = chatml(CONTENT)  # that of the published checkpoints
    frames_apart: ClassVar = True
    processors: ClassVar = {
        **{name: fields for name, fields in NativeResolutionConfig.processors.items() if "Image" in name},
        "Qwen3VLVideoProcessor": dict(image_mean=0.5, image_std=0.5, patch_size=16, temporal_patch_size=2, merge_size=2,
                                      size={"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768}),
    }  # fmt: skip
    kinds: ClassVar[Mapping[PictureKind, str]] = {**NativeResolutionConfig.kinds, "video": "Qwen3VLVideoProcessor"}
    decoders: ClassVar[Mapping[str, Kind]] = _DECODERS  # by family
    tower: ClassVar[Mapping[str, Any]] = TOWER  # class defaults in transformers
    tied_by_either: ClassVar[tuple[str, ...]] = ("qwen3_vl",)  # other families use the outer field alone
    tokens: ClassVar[tuple[int, int, int]] = (151655, 151656, 151645)  # default ids: image, video, end

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        return Qwen3VlPictures(settings=self.read_settings(folder, layout, ("image", "video")), config=self.vision)

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        family, part = raw["model_type"], dict(raw.get("text_config") or {})
        require("text_config.model_type", part.get("model_type", f"{family}_text"), f"{family}_text")
        # The class of the decoder with experts has another default, which transformers does not use.
        tied = tied_by_either(raw) if family in cls.tied_by_either else raw
        decoder = cls.decoders[family].read(part | {"tie_word_embeddings": bool(tied.get("tie_word_embeddings"))})
        vision = _read_tower(raw.get("vision_config") or {}, cls.tower)
        check_decoder(decoder, vision.out_width)
        if len(vision.deep) > decoder.layers:
            raise InputError(f"config.json: vision_config.deepstack_visual_indexes names {len(vision.deep)} blocks, "
                             f"but the decoder has {decoder.layers} layers")  # fmt: skip
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", default=cls.tokens[0]),
            "video_token": token_id(raw, "video_token_id", default=cls.tokens[1]),
            "stop": read_stop(raw, cls.tokens[2]),
        }


def _read_tower(raw: Raw, defaults: Mapping[str, Any]) -> Qwen3VisionConfig:
    c, where = tower_fields(raw, defaults), "vision_config."
    require_all(c, {"hidden_act": defaults["hidden_act"], "in_channels": 3}, where)
    table = math.isqrt(positive(where + "num_position_embeddings", c["num_position_embeddings"]))
    if table**2 != c["num_position_embeddings"]:
        raise InputError(f"config.json: {where}num_position_embeddings={c['num_position_embeddings']} must be a square")
    sizes, deep = read_sizes(c, SIZES), c["deepstack_visual_indexes"]
    numbers = isinstance(deep, list | tuple) and all(isinstance(i, int) and 0 <= i < c["depth"] for i in deep)
    if not numbers or list(deep) != sorted(set(deep)):
        raise InputError(f"config.json: {where}deepstack_visual_indexes={deep!r} must be increasing indices of "
                         f"{c['depth']} blocks")  # fmt: skip
    return Qwen3VisionConfig(
        **sizes, activation=c["hidden_act"], norm="layer_norm", gated=False, deep=tuple(deep), table=table
    )
