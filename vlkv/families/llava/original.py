"""LLaVA-1.5 as its authors publish it (`liuhaotian/llava-v1.5-*`): a decoder's config that only names its tower.

The vocabulary has no token for an image: the id behind the last one stands for it. The tower's own image processor
reads pictures, behind a padding to a square where the config says so, and prompts are Vicuna's conversation; the
checkpoints carry neither as a file. MobileVLM-V2 is published in the same form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig, Raw, honour, require
from vlkv.errors import InputError
from vlkv.families.llava.config import CLIP_LARGE
from vlkv.families.llava.inputs import LlavaInputs
from vlkv.families.llava.weights import names
from vlkv.families.text.config import KINDS
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout, PixelSettings, read_settings
from vlkv.processing.templates import ChatTemplate
from vlkv.towers.vit import ClipConfig

# The towers that the published models name.
_TOWERS = {
    "clip-vit-large-patch14": {**CLIP_LARGE, "image_size": 224},
    "clip-vit-large-patch14-336": CLIP_LARGE,
}
_SELECTED = {"patch": "default", "cls_patch": "full"}
_SETTINGS = ("processor_config.json", "preprocessor_config.json")
_TOWER = "model.vision_tower."
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
    "{% for message in messages %}"
    "{% if message.role == 'user' %}USER: {{ message.content }} "
    "{% else %}ASSISTANT: {{ message.content }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


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


class VicunaInputs(LlavaInputs):
    """Vicuna's conversation, version 1.1, where the folder has no template."""

    def template(self, folder: Path) -> ChatTemplate | None:
        """How a conversation is written."""
        return super().template(folder) or ChatTemplate.from_text(_VICUNA, "Vicuna's conversation")


class LlavaOriginalConfig(VicunaInputs):
    """The form of `config.json` that the authors' code reads."""

    projector: ClassVar[str] = "mlp2x_gelu"

    @property
    def side(self) -> int:
        """Tokens per side."""
        return self.wiring.side

    @classmethod
    def read(cls, raw: Raw) -> dict[str, Any]:
        """The fields of the config; raises InputError for what we do not honour."""
        folder = tower_folder(raw)
        require("mm_projector_type", raw.get("mm_projector_type", "linear"), cls.projector)
        honour(raw, {"vision_tower_type": "clip", "mm_patch_merge_type": "flat"})
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
            "wiring": OriginalConfig(tower=folder, pad=aspect == "pad", side=cls.tokens_per_side(raw, vision.grid)),
        }

    @classmethod
    def tokens_per_side(cls, raw: Raw, grid: int) -> int:
        """Tokens per side, of so many patches."""
        del raw
        return grid

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        """The settings of the folder, else of the tower's folder in it, else CLIP's own at the tower's size."""
        layout, side = "pad" if self.wiring.pad else layout, self.vision.image_size
        for place in (folder, folder / self.wiring.tower):
            if any((place / name).is_file() for name in _SETTINGS):
                return self.squares(read_settings(place, layout, self.kinds))
        return self.squares(PixelSettings.from_hf({"size": side, "crop_size": side}, str(folder), layout))


def claims(raw: Raw) -> bool:
    """Early checkpoints say `llava`, which transformers took for its own form of the model."""
    return raw.get("model_type") == "llava" and "mm_vision_tower" in raw and not claims_video(raw)


def claims_video(raw: Raw) -> bool:
    """LLaVA-Video and OneVision say so too, and what class reads them."""
    return "LlavaQwenForCausalLM" in (raw.get("architectures") or ())


def complete(raw: Raw, read_beside: Callable[[str], Raw | None]) -> dict[str, Any]:
    """A `config.json` with its tower's config in it, where the folder has that."""
    tower = read_beside(f"{tower_folder(raw)}/config.json")
    return {**raw, **({} if tower is None else {"vision_config": tower.get("vision_config", tower)})}


def tower_folder(raw: Raw) -> str:
    """Last part of the tower's name: its folder inside the checkpoint's, whatever its path was when it was trained."""
    name = raw.get("mm_vision_tower")
    last = name.rstrip("/").rsplit("/", 1)[-1] if isinstance(name, str) else ""
    if last in ("", ".", ".."):
        raise InputError(f"config.json: mm_vision_tower={name!r} names no tower")
    return last


def _read_tower(raw: Raw, folder: str) -> ClipConfig:
    vision = raw.get("vision_config", _TOWERS.get(folder))
    if vision is None:
        raise InputError(
            f"config.json: mm_vision_tower={raw['mm_vision_tower']!r} is not known (known: {', '.join(_TOWERS)}): "
            f"put its config.json into a folder {folder} inside the checkpoint's"
        )
    selected = raw.get("mm_vision_select_feature", "patch")
    require("mm_vision_select_feature", selected, *_SELECTED)
    layer = raw.get("mm_vision_select_layer", -2)
    return ClipConfig.beside({"vision_config": vision, "vision_feature_layer": layer,
                              "vision_feature_select_strategy": _SELECTED[selected]})  # fmt: skip


# What the authors' code calls a part of a LLaVA, and what transformers calls it.
ORIGINAL_RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^model\.vision_tower\.vision_tower\.", _TOWER),
    (r"^model\.mm_projector\.0\.", "model.multi_modal_projector.linear_1."),
    (r"^model\.mm_projector\.2\.", "model.multi_modal_projector.linear_2."),
)


def original_names(config: ModelConfig) -> Names:
    """Of a LLaVA under the authors' names, whose tower may be in a folder of its own."""
    made = names(config)
    return dataclasses.replace(made, renames=(*ORIGINAL_RENAMES, *made.renames), tower=(config.wiring.tower, _TOWER))
