"""LLaVA-1.5 and MobileVLM-V2 as their authors publish them: a decoder's config that only names its tower.

Liu et al. 2023 (`liuhaotian/llava-v1.5-*`) and Chu et al. 2024 (`mtgv/MobileVLM_V2-*`) differ in the projector alone.
Neither has a token for an image in its vocabulary: the id behind the last one stands for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.config.checks import require
from vlkv.config.clip import ClipConfig
from vlkv.config.decoder import DecoderConfig
from vlkv.errors import InputError

# model_type on disk -> family. Early LLaVA-1.5 says `llava`, which transformers took for its own form of the model.
_FAMILIES = {"llava": "llava_llama", "llava_llama": "llava_llama", "mobilevlm": "mobilevlm"}
_PROJECTORS = {"llava_llama": "mlp2x_gelu", "mobilevlm": "ldpnetv2"}
_LARGE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14)
# The towers that the published models name.
_TOWERS = {
    "clip-vit-large-patch14": {**_LARGE, "image_size": 224},
    "clip-vit-large-patch14-336": {**_LARGE, "image_size": 336},
}
_SELECTED = {"patch": "default", "cls_patch": "full"}
_LDP_SIDE = 12  # LDPv2 pools to 12 x 12 tokens, whatever it is given


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginalConfig:
    """What the tower's config does not say.

    Attributes:
        tower: name of the tower's own folder, inside the checkpoint's.
        pad: pictures are padded to a square.
        side: vision tokens per side of an image.
    """

    tower: str
    pad: bool
    side: int


def completed(raw: Mapping[str, Any], tower: Mapping[str, Any] | None) -> dict[str, Any]:
    """A `config.json`, and if it is an original one, its family and its tower's config (None: only named) in it."""
    if not is_original(raw):
        return dict(raw)
    made = {**raw, "model_type": _FAMILIES[raw["model_type"]]}
    if tower is not None:
        made["vision_config"] = tower.get("vision_config", tower)
    return made


def is_original(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of these."""
    return raw.get("model_type") in list(_FAMILIES) and "mm_vision_tower" in raw  # it may be no text


def tower_folder(raw: Mapping[str, Any]) -> str:
    """Last part of the tower's name: its folder inside the checkpoint's, whatever its path was when it was trained."""
    name = raw.get("mm_vision_tower")
    last = name.rstrip("/").rsplit("/", 1)[-1] if isinstance(name, str) else ""
    if last in ("", ".", ".."):
        raise InputError(f"config.json: mm_vision_tower={name!r} names no tower")
    return last


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig; raises InputError for what we do not honour."""
    family, folder = raw["model_type"], tower_folder(raw)
    require("mm_projector_type", raw.get("mm_projector_type", "linear"), _PROJECTORS[family])
    require("vision_tower_type", raw.get("vision_tower_type", "clip"), "clip")
    require("mm_patch_merge_type", raw.get("mm_patch_merge_type", "flat"), "flat")
    for field in ("mm_use_im_start_end", "s2"):
        require(field, bool(raw.get(field, False)), False)
    aspect = raw.get("image_aspect_ratio")
    if aspect not in (None, "square", "pad"):
        raise InputError(f"config.json: image_aspect_ratio={aspect!r} is not supported (only 'square' and 'pad')")
    vision = _tower(raw, folder)
    if vision.width != raw.get("mm_hidden_size", vision.width):
        raise InputError(f"config.json: mm_hidden_size={raw['mm_hidden_size']!r}, but the tower {folder} "
                         f"is {vision.width} wide")  # fmt: skip
    side = vision.grid
    if family == "mobilevlm":
        require("mm_vision_select_feature", raw.get("mm_vision_select_feature", "patch"), "patch")
        if side % _LDP_SIDE:
            raise InputError(f"config.json: a tower of {side} x {side} patches is not supported: "
                             f"the projector pools them to {_LDP_SIDE} x {_LDP_SIDE}")  # fmt: skip
        side = _LDP_SIDE
    decoder = DecoderConfig.from_hf("llama", raw)
    return {
        "decoder": decoder,
        "vision": vision,
        "image_token": decoder.vocab_size,
        "wiring": OriginalConfig(tower=folder, pad=aspect == "pad", side=side),
    }


def _tower(raw: Mapping[str, Any], folder: str) -> ClipConfig:
    vision = raw.get("vision_config", _TOWERS.get(folder))
    if vision is None:
        raise InputError(
            f"config.json: mm_vision_tower={raw['mm_vision_tower']!r} is not known (known: {', '.join(_TOWERS)}): "
            f"put its config.json into a folder {folder} inside the checkpoint's"
        )
    selected = raw.get("mm_vision_select_feature", "patch")
    if selected not in _SELECTED:
        raise InputError(f"config.json: mm_vision_select_feature={selected!r} is neither patch nor cls_patch")
    return ClipConfig.from_hf(
        {
            "vision_config": vision,
            "vision_feature_layer": raw.get("mm_vision_select_layer", -2),
            "vision_feature_select_strategy": _SELECTED[selected],
        }
    )
