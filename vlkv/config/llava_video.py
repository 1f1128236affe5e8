"""Original checkpoints of LLaVA-Video and OneVision (LlavaQwenForCausalLM): a SigLIP tower and a Qwen2 decoder.

Their config is Qwen2's with fields of the tower (`mm_...`) beside it; whatever it says in `text_config` or of another
tower is left over from a class that does not read it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vlkv.config import text
from vlkv.config.anyres import AnyRes, VideoPooling, most_tiles, pinpoints
from vlkv.config.checks import positive, require
from vlkv.config.siglip import SiglipConfig
from vlkv.errors import InputError

# The last of its 27 blocks is cut off where it is loaded.
_TOWERS = {
    "siglip-so400m-patch14-384": dict(hidden_size=1152, intermediate_size=4304, patch_size=14, image_size=384,
                                      num_hidden_layers=26, num_attention_heads=16),
}  # fmt: skip
_NEWLINES = {"grid": "line", "frame": "frame", "one_token": "video", "no_token": "none"}
_ONE_VALUE = {
    "mm_projector_type": "mlp2x_gelu", "mm_patch_merge_type": "spatial_unpad", "mm_vision_select_feature": "patch",
    "mm_resampler_type": None, "mm_use_im_start_end": False, "mm_use_im_patch_token": False,
    "add_faster_video": False, "use_pos_skipping": False,
}  # fmt: skip


def nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config as transformers would write it: the decoder's fields in `text_config`."""
    decoder = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config")}
    return {**raw, "model_type": "llava_qwen", "text_config": {**decoder, "model_type": "qwen2"}}


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    for field, value in _ONE_VALUE.items():
        require(field, raw.get(field, value), value)
    tower = SiglipConfig.from_hf({"vision_config": _tower(raw)})
    return {
        "decoder": text.decoder(raw),
        "vision": tower,
        # One token stands for a picture and for a video.
        "image_token": raw.get("image_token_index", 151646),
        "video_token": raw.get("image_token_index", 151646),
        "wiring": AnyRes(
            pinpoints=pinpoints(_height_first(raw.get("image_grid_pinpoints"), tower.image_size), tower.image_size),
            most_tiles=most_tiles(raw.get("image_aspect_ratio"), "image_aspect_ratio"),
            only_alone=True,
            rounded=False,
            video=_video(raw),
        ),
    }


def _tower(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    own = raw.get("vision_config") or {}
    if own.get("model_type") == "siglip_vision_model":
        return own
    name = str(raw.get("mm_vision_tower")).rsplit("/", maxsplit=1)[-1]
    if name not in _TOWERS:
        raise InputError(f"config.json: mm_vision_tower={raw.get('mm_vision_tower')!r} is not supported "
                         f"(supported: {', '.join(_TOWERS)})")  # fmt: skip
    return _TOWERS[name]


def _video(raw: Mapping[str, Any]) -> VideoPooling:
    mode, newline = raw.get("mm_spatial_pool_mode", "bilinear"), raw.get("mm_newline_position", "one_token")
    if mode not in ("average", "bilinear"):
        raise InputError(f"config.json: mm_spatial_pool_mode={mode!r} is neither average nor bilinear")
    if newline not in _NEWLINES:
        raise InputError(f"config.json: mm_newline_position={newline!r} is none of {', '.join(_NEWLINES)}")
    stride = positive("mm_spatial_pool_stride", raw.get("mm_spatial_pool_stride") or 2)
    return VideoPooling(mode=mode, stride=stride, newline=_NEWLINES[newline])  # type: ignore[arg-type]


def _height_first(value: Any, side: int) -> Any:
    """Pinpoints are (width, height) here, and may be a range of tiles: "(1x1),...,(6x6)"."""
    if isinstance(value, str):
        ends = re.findall(r"\((\d+)x(\d+)\)", value)
        if len(ends) < 2:
            raise InputError(f"config.json: image_grid_pinpoints={value!r} is no range such as (1x1),...,(6x6)")
        first, last = ([int(n) for n in end] for end in (ends[0], ends[-1]))
        value = [[x * side, y * side] for x in range(first[0], last[0] + 1) for y in range(first[1], last[1] + 1)]
    return [pair[::-1] if isinstance(pair, list) else pair for pair in value] if isinstance(value, list) else value
