"""LLaVA-Video and OneVision in their authors' form (LlavaQwenForCausalLM): a SigLIP tower and a Qwen2 decoder.

`config.json` is Qwen2's with fields for the tower (`mm_...`). The authors' code ignores `text_config` and the
`vision_config` of other towers, so we do too.
"""

from __future__ import annotations

import re
from typing import Any

from typing_extensions import override

from vlkv.config import Raw, positive, require, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.llava.config import read_common
from vlkv.families.llava.original import known_tower
from vlkv.families.llava_next.config import (
    SIGLIP,
    AnyRes,
    LlavaOnevisionConfig,
    VideoPooling,
    read_most_tiles,
    read_pinpoints,
)
from vlkv.families.llava_next.inputs import AnyResConfig
from vlkv.families.text.config import read_stop
from vlkv.towers.vit import SiglipConfig

_NEWLINES = {"grid": "line", "frame": "frame", "one_token": "video", "no_token": "none"}
_ONE_VALUE = {
    "mm_projector_type": "mlp2x_gelu", "mm_patch_merge_type": "spatial_unpad", "mm_vision_select_feature": "patch",
    "mm_resampler_type": None, "mm_use_im_start_end": False, "mm_use_im_patch_token": False,
    "add_faster_video": False, "use_pos_skipping": False, "use_image_newline_parameter": True,
}  # fmt: skip


class LlavaVideoConfig(AnyResConfig):
    """The form of `config.json` that the authors' code reads."""

    prompt_format = LlavaOnevisionConfig.prompt_format
    kind = video_kind = "SiglipImageProcessor"

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require_all(raw, _ONE_VALUE)
        tower = SiglipConfig.from_hf(_tower(raw), -1, whole=False)
        decoder = {field: value for field, value in raw.items() if field not in ("text_config", "vision_config")}
        nested = {**raw, "text_config": {**decoder, "model_type": "qwen2"}}
        token = token_id(raw, "image_token_index", default=151646)  # for both images and videos
        return read_common(nested, token) | {
            "stop": read_stop(nested),
            "video_token": token,
            "projector_bias": True,
            "vision": tower,
            "wiring": AnyRes(
                pinpoints=read_pinpoints(_height_first(raw.get("image_grid_pinpoints"), tower.image_size),
                                         tower.image_size),
                most_tiles=read_most_tiles(raw.get("image_aspect_ratio"), "image_aspect_ratio"),
                only_alone=True,
                rounded=False,
                video=_video(raw),
            ),
        }  # fmt: skip


def _tower(raw: Raw) -> Raw:
    own = raw.get("vision_config") or {}
    if own.get("model_type") == "siglip_vision_model":
        return own
    return known_tower(raw, {"siglip-so400m-patch14-384": SIGLIP})


def _video(raw: Raw) -> VideoPooling:
    mode, newline = raw.get("mm_spatial_pool_mode", "bilinear"), raw.get("mm_newline_position", "one_token")
    require("mm_spatial_pool_mode", mode, "average", "bilinear")
    require("mm_newline_position", newline, *_NEWLINES)
    stride = positive("mm_spatial_pool_stride", raw.get("mm_spatial_pool_stride") or 2)
    return VideoPooling(mode=mode, stride=stride, newline=_NEWLINES[newline])  # type: ignore[arg-type]  # checked above


def _height_first(value: Any, side: int) -> Any:
    """Pinpoints with the height first. Here they are (width, height), or a range of tiles: "(1x1),...,(6x6)"."""
    if isinstance(value, str):
        ends = re.findall(r"\((\d+)x(\d+)\)", value)
        if len(ends) < 2:
            raise InputError(f"config.json: image_grid_pinpoints={value!r} is not a range such as (1x1),...,(6x6)")
        first, last = ([int(n) for n in end] for end in (ends[0], ends[-1]))
        value = [[x * side, y * side] for x in range(first[0], last[0] + 1) for y in range(first[1], last[1] + 1)]
    return [pair[::-1] if isinstance(pair, list) else pair for pair in value] if isinstance(value, list) else value
