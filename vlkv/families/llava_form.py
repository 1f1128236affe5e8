"""What checkpoints in the forms of LLaVA have in common: fields, processors, tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from vlkv.config import Raw, require_all, token_id
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import read_decoder
from vlkv.files import class_defaults
from vlkv.processing.pixels import KINDS

T = TypeVar("T")
# Image and video processors of all LLaVA families in transformers.
LLAVA_KINDS: dict[str, dict[str, Any]] = KINDS | class_defaults("llava")
# Default sizes of the tilings of LLaVA-NeXT, and of those of LLaVA-OneVision.
PINPOINTS = LLAVA_KINDS["LlavaNextImageProcessor"]["image_grid_pinpoints"]
TILES = LLAVA_KINDS["LlavaOnevisionImageProcessor"]["image_grid_pinpoints"]


def read_common(raw: Raw, image_token: int, video_token: int | None = None) -> dict[str, Any]:
    """The fields that all LLaVA families have in common; InputError for an unsupported projector or decoder.

    `image_token` and `video_token`: the ids if `raw`, a `config.json`, has none. `video_token` is None if the family
    does not support videos.
    """
    require_all(raw, {"projector_hidden_act": "gelu"})

    def token(kind: str, default: int) -> int:
        # transformers 5 also calls the field `..._token_id`, and that name decides if a file has both.
        return token_id(raw, f"{kind}_token_id", f"{kind}_token_index", default=default)

    return {
        "decoder": read_decoder(raw),
        "image_token": token("image", image_token),
        "video_token": None if video_token is None else token("video", video_token),
        "projector_bias": raw.get("multimodal_projector_bias", True),
    }


def claims_video(raw: Raw) -> bool:
    """Whether the config is that of LLaVA-Video or OneVision; its `model_type` may be `llava` too."""
    return "LlavaQwenForCausalLM" in (raw.get("architectures") or ())


def tower_folder(raw: Raw) -> str:
    """Name of the tower's folder: the last part of `mm_vision_tower`, which may be a path of the authors' machine."""
    name = raw.get("mm_vision_tower")
    last = name.rstrip("/").rsplit("/", 1)[-1] if isinstance(name, str) else ""
    if last in ("", ".", ".."):
        raise InputError(f"config.json: mm_vision_tower={name!r} is not the name of a tower")
    return last


def known_tower(raw: Raw, towers: Mapping[str, T]) -> T:
    """The entry of `towers` for the tower that `mm_vision_tower` names; InputError for other names."""
    name = tower_folder(raw)
    if name not in towers:
        raise InputError(f"config.json: mm_vision_tower={raw['mm_vision_tower']!r} is not supported "
                         f"(only {', '.join(towers)})")  # fmt: skip
    return towers[name]
