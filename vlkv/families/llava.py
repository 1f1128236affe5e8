"""LLaVA-1.5 (Liu et al. 2023) in both its forms, and MobileVLM-V2 (Chu et al. 2024): a CLIP tower, a projector, Llama.

The authors' form (`liuhaotian/llava-v1.5-*`, `mtgv/MobileVLM_V2-*`): `config.json` is the decoder's and only names the
tower. The vocabulary has no image token, so the first id after it is used. Images are padded to a square if the config
asks for it, then processed by the tower's image processor. Prompts have Vicuna's format. The checkpoints contain
neither the processor's settings nor a chat template. MobileVLM-V2 has a projector that pools patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
from einops import reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig, Raw, require, require_all
from vlkv.decoder.layers import Initializer, Mlp
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import KINDS, tied_by_either
from vlkv.families.family import Family, VisionLanguageModel, flat
from vlkv.families.llava_form import LLAVA_KINDS, claims_video, read_common, tower_folder
from vlkv.families.names import stored_names
from vlkv.inputs import Inputs
from vlkv.processing.host import SquareConfig
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Layout, RawSettings, find_settings
from vlkv.processing.templates import stored
from vlkv.towers.vit import CLIP_LARGE, ClipConfig

# Towers of the published models, by name.
_TOWERS = {"clip-vit-large-patch14": {**CLIP_LARGE, "image_size": 224}, "clip-vit-large-patch14-336": CLIP_LARGE}
# `mm_vision_select_feature` of the authors -> `vision_feature_select_strategy` of transformers.
_SELECTED = {"patch": "default", "cls_patch": "full"}
_SETTINGS = ("processor_config.json", "preprocessor_config.json")
SIDE = 12  # LDPv2 always pools to 12 x 12 tokens


class LlavaConfig(SquareConfig):
    """A CLIP tower and any decoder. Every image becomes one square of patches."""

    kinds = LLAVA_KINDS
    kind = "LlavaImageProcessor"
    # The format in transformers' documentation of LLaVA-1.5.
    prompt_format = stored("llava")

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        return read_common(tied_by_either(raw), 32000) | {"vision": ClipConfig.from_config_json(raw)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OriginalConfig:
    """Settings that only this form has; `LlavaOriginalConfig.wiring`."""

    tower: str  # folder of the tower inside the checkpoint's folder
    pad: bool  # images are padded to a square


class LlavaOriginalConfig(SquareConfig):
    """The form of `config.json` that the authors' code reads."""

    kinds = LLAVA_KINDS
    prompt_format = stored("vicuna")
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
        for source in (folder, folder / self.wiring.tower):
            if any((source / name).is_file() for name in _SETTINGS):
                return self.squares(find_settings(source, self.kinds).pixels(layout))
        return self.squares(RawSettings({"size": side, "crop_size": side}, str(folder)).pixels(layout))


class MobileVlmConfig(LlavaOriginalConfig):
    """The projector pools a square of patches, so the class token must be dropped."""

    projector = "ldpnetv2"

    @property
    @override
    def side(self) -> int:
        return SIDE

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require_all(raw, {"mm_vision_select_feature": "patch"})
        fields = super().read(raw)
        if (grid := fields["vision"].grid) % SIDE:
            raise InputError(f"config.json: a tower of {grid} x {grid} patches is not supported: "
                             f"the projector pools them to {SIDE} x {SIDE}")  # fmt: skip
        return fields


def claims(raw: Raw) -> bool:
    """Whether the config is in the authors' form. Early ones have the `model_type` of transformers' form, `llava`."""
    return raw.get("model_type") == "llava" and "mm_vision_tower" in raw and not claims_video(raw)


def complete(raw: Raw, read_beside: Callable[[str], Raw | None]) -> dict[str, Any]:
    """Adds the tower's config to `config.json` if the folder contains it."""
    tower = read_beside(f"{tower_folder(raw)}/config.json")
    return {**raw, **({} if tower is None else {"vision_config": tower.get("vision_config", tower)})}


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


class LdpProjector(Mlp):
    """LDPv2 (Sec. 3.2): two linear maps, mean pooling, and a depthwise 3 x 3 convolution with a residual."""

    def __init__(self, width_in: int, width_out: int, *, init: Initializer) -> None:
        super().__init__(width_in, width_out, width_out, init=init)
        self.weight = init.normal(width_out, 1, 3, 3, scale=1 / 3)
        self.bias = init.constant(0.0, width_out)

    def __call__(self, x: Float[Array, "I V C"]) -> Float[Array, "I v D"]:
        """Maps the features of all patches to SIDE x SIDE tokens of the decoder's width."""
        x = pool(super().__call__(x))
        x = x.reshape(-1, SIDE, SIDE, x.shape[-1])
        padded, weight = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), self.weight[...][:, 0]
        for line in range(3):
            for column in range(3):
                x = x + padded[:, line : line + SIDE, column : column + SIDE] * weight[:, line, column]
        return (x + self.bias[...]).reshape(len(x), SIDE**2, -1)


class MobileVlm(VisionLanguageModel):
    """Each vision token is the mean of a window of patches."""

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return LdpProjector(config.vision.width, config.decoder.width, init=init)

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        return flat(pool(attention))


def pool(x: Float[Array, "I V C"]) -> Float[Array, "I v C"]:
    """Mean pooling of a square of patches to SIDE x SIDE tokens."""
    grid = round(x.shape[1] ** 0.5)
    x = x.reshape(-1, grid, grid, x.shape[-1])
    return reduce(x, "i (y a) (x b) c -> i (y x) c", "mean", a=grid // SIDE, b=grid // SIDE)


FAMILIES = {
    "llava": Family(config=LlavaConfig, model=VisionLanguageModel, names=stored_names("llava")),
    "llava_llama": Family(
        config=LlavaOriginalConfig,
        model=VisionLanguageModel,
        names=stored_names("llava_llama"),
        complete=complete,
        claims=claims,
    ),
    "mobilevlm": Family(config=MobileVlmConfig, model=MobileVlm, names=stored_names("mobilevlm"), complete=complete),
}
