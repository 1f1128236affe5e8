"""LLaVA-1.5 in its authors' form (`liuhaotian/llava-v1.5-*`): `config.json` is the decoder's and only names the tower.

The vocabulary has no image token, so the first id after it is used. Images are padded to a square if the config asks
for it, then processed by the tower's image processor. Prompts have Vicuna's format. The checkpoints contain neither the
processor's settings nor a chat template. MobileVLM-V2 is published in the same form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import override

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig, Raw, require, require_all
from vlkv.errors import InputError
from vlkv.families.llava.vicuna import VicunaConfig
from vlkv.families.llava.weights import names
from vlkv.families.text.config import KINDS
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout, PixelSettings, read_settings
from vlkv.towers.vit import CLIP_LARGE, ClipConfig

T = TypeVar("T")
# Towers of the published models, by name.
_TOWERS = {
    "clip-vit-large-patch14": {**CLIP_LARGE, "image_size": 224},
    "clip-vit-large-patch14-336": CLIP_LARGE,
}
_SELECTED = {"patch": "default", "cls_patch": "full"}
_SETTINGS = ("processor_config.json", "preprocessor_config.json")
_TOWER = "model.vision_tower."


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginalConfig:
    """The family's own settings.

    Attributes:
        tower: name of the folder of the tower inside the checkpoint's folder.
        pad: whether images are padded to a square.
    """

    tower: str
    pad: bool


class LlavaOriginalConfig(VicunaConfig):
    """The form of `config.json` that the authors' code reads."""

    projector: ClassVar[str] = "mlp2x_gelu"

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        folder = tower_folder(raw)
        require("mm_projector_type", raw.get("mm_projector_type", "linear"), cls.projector)
        require_all(raw, {"vision_tower_type": "clip", "mm_patch_merge_type": "flat"})
        for field in ("mm_use_im_start_end", "s2"):
            require(field, bool(raw.get(field, False)), False)
        aspect = raw.get("image_aspect_ratio") or "square"
        require("image_aspect_ratio", aspect, "square", "pad")
        vision = _read_tower(raw, folder)
        if vision.width != raw.get("mm_hidden_size", vision.width):
            raise InputError(f"config.json: mm_hidden_size={raw['mm_hidden_size']!r}, but the tower {folder} "
                             f"is {vision.width} wide")  # fmt: skip
        decoder = KINDS["llama"].read(raw)
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": decoder.vocab_size,
            "wiring": OriginalConfig(tower=folder, pad=aspect == "pad"),
        }

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        """Uses the folder's settings, else those of the tower's folder, else CLIP's defaults at the tower's size."""
        self.check_layout(layout, "pad")
        layout, side = "pad" if self.wiring.pad else layout, self.vision.image_size
        for place in (folder, folder / self.wiring.tower):
            if any((place / name).is_file() for name in _SETTINGS):
                return self.squares(read_settings(place, layout, self.kinds))
        return self.squares(PixelSettings.from_hf({"size": side, "crop_size": side}, str(folder), layout))


def claims(raw: Raw) -> bool:
    """Whether the config is in the authors' form. Early ones have the `model_type` of transformers' form, `llava`."""
    return raw.get("model_type") == "llava" and "mm_vision_tower" in raw and not claims_video(raw)


def claims_video(raw: Raw) -> bool:
    """Whether the config is that of LLaVA-Video or OneVision; its `model_type` may be `llava` too."""
    return "LlavaQwenForCausalLM" in (raw.get("architectures") or ())


def complete(raw: Raw, read_beside: Callable[[str], Raw | None]) -> dict[str, Any]:
    """Adds the tower's config to `config.json` if the folder contains it."""
    tower = read_beside(f"{tower_folder(raw)}/config.json")
    return {**raw, **({} if tower is None else {"vision_config": tower.get("vision_config", tower)})}


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


def _read_tower(raw: Raw, folder: str) -> ClipConfig:
    vision = raw.get("vision_config", _TOWERS.get(folder))
    if vision is None:
        raise InputError(
            f"config.json: mm_vision_tower={raw['mm_vision_tower']!r} is not known (known: {', '.join(_TOWERS)}): "
            f"put its config.json into a folder {folder} of the checkpoint"
        )
    selected = raw.get("mm_vision_select_feature", "patch")
    require("mm_vision_select_feature", selected, *_SELECTED)
    layer = raw.get("mm_vision_select_layer", -2)
    return ClipConfig.from_config_json({"vision_config": vision, "vision_feature_layer": layer,
                              "vision_feature_select_strategy": _SELECTED[selected]})  # fmt: skip


# From the authors' tensor names to those of transformers.
ORIGINAL_RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^model\.vision_tower\.vision_tower\.", _TOWER),
    (r"^model\.mm_projector\.0\.", "model.multi_modal_projector.linear_1."),
    (r"^model\.mm_projector\.2\.", "model.multi_modal_projector.linear_2."),
)


def original_names(config: ModelConfig) -> Names:
    """The names of all parameters in the authors' form. The tower may be in a separate folder."""
    made = names(config).extended(renames=ORIGINAL_RENAMES)
    return dataclasses.replace(made, tower=(config.wiring.tower, _TOWER))
