"""InternVL (Chen et al. 2024): an InternViT tower over tiles, pixel shuffle, a two-layer projector, any decoder.

InternVL2.5, InternVL3 and InternVL3.5 in transformers' form; InternVL-Chat-V1.5 and InternVL2 to InternVL3.5 in their
authors' form (`internvl_chat`), whose `config.json` contains neither the id of the image token nor that of the stop
token. Both are looked up by their text among the tokenizer's added tokens.

Images are cut into square tiles, on the tiling that distorts them least, with a thumbnail at the end, and resized by
PIL. Only the tokens of tiles are vision tokens. The marks `<img>` and `</img>` around an image are text. So is
`Frame1: ` before a frame of a video; each frame is one tile.

Prompt formats of the original checkpoints, which ship them as Python code and not as a chat template, are those of
`internvl_chat/internvl/conversation.py` of the authors' repository. One known difference: InternVL-Chat-V1.5 was
published with InternLM's system message under the name `internlm2-chat`; that repository, and we, use InternVL2's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import PIL.Image
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig, Raw, filled, is_token_id, positive, require, require_all, token_id
from vlkv.decoder.layers import Initializer, LayerNorm, Mlp
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import read_decoder
from vlkv.families.family import Family
from vlkv.families.models import ShuffledModel
from vlkv.families.names import stored_names
from vlkv.files import DATA, class_defaults
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, tiles_of
from vlkv.processing.pixels import (
    NO_VIDEO,
    Layout,
    PixelSettings,
    RawSettings,
    find_settings,
    find_video_settings,
    to_pixels,
)
from vlkv.processing.templates import ChatTemplate, stored
from vlkv.processing.tiles import TilesConfig, tile_arrays
from vlkv.towers.vit import VitConfig

TOKEN = "<IMG_CONTEXT>"
# Class defaults in transformers, for fields that a file leaves out.
KIND = "GotOcr2ImageProcessor"
_DEFAULTS = dict(size={"height": 384, "width": 384}, do_center_crop=False, crop_size=None, default_to_square=True)
_VIDEO_KIND = "InternVLVideoProcessor"
_KINDS = {KIND: dict(_DEFAULTS, min_patches=1, max_patches=12), _VIDEO_KIND: _DEFAULTS}
CONVERSATIONS = json.loads((DATA / "prompts" / "internvl.json").read_text(encoding="utf-8"))


class InternTilesConfig(TilesConfig):
    """Images as tiles and a thumbnail."""

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout)
        settings, video = self.settings(folder), self.video_settings(folder)
        raw = settings.filled()
        for field in ("min_patches", "max_patches"):
            if not isinstance(raw[field], int) or raw[field] < 1:
                raise settings.error(f"{field}={raw[field]!r} must be a whole number of at least 1")
        if raw["min_patches"] > raw["max_patches"]:
            raise settings.error(f"min_patches={raw['min_patches']} is above max_patches={raw['max_patches']}")
        return InternVlPictures(
            settings=self._square(settings), frame=None if video is None else self._square(video),
            side=self.vision.image_size,
            tokens=self.per_picture, min_tiles=raw["min_patches"], max_tiles=raw["max_patches"],
            thumbnail=self.wiring.thumbnail,
        )  # fmt: skip

    def _square(self, raw: RawSettings) -> PixelSettings:
        """The settings for one tile or frame; InputError unless they resize to the tower's size."""
        settings, side = raw.pixels(), self.vision.image_size
        if settings.size is None or settings.crop is not None:
            raise raw.error("do_resize=False and do_center_crop=True are not supported")
        if settings.size != (side, side):
            raise raw.mismatch(f"tiles of {settings.size} pixels", f"takes {side} x {side}")
        return settings

    def settings(self, folder: Path) -> RawSettings:
        """The settings of a folder's image processor."""
        # transformers' processor of this family sets `crop_to_patches`, so it is ignored
        return find_settings(folder, _KINDS, KIND)

    def video_settings(self, folder: Path) -> RawSettings | None:
        """The settings of a folder's video processor; None if there are none."""
        return find_video_settings(folder, _KINDS, KIND)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVlPictures(Pictures):
    """Converts images and videos to tiles."""

    spelled: ClassVar[Mapping[str, str]] = {"video": "<video>"}

    settings: PixelSettings  # for one tile
    frame: PixelSettings | None  # for one frame of a video; None: the folder has no settings for videos
    side: int  # pixels of a tile
    tokens: int  # vision tokens of a tile
    min_tiles: int
    max_tiles: int
    thumbnail: bool

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """The image becomes its tiles, line by line, and a thumbnail of the whole."""
        columns, lines = tiling(image.width, image.height, self.side, self.min_tiles, self.max_tiles)
        tiles, view = [image], (0, 0)
        if columns * lines > 1:
            width, height = columns * self.side, lines * self.side
            check_area(width, height, f"the {image.width} x {image.height} image, after resizing")
            tiles = tiles_of(image.resize((width, height), resample=self.settings.resample), self.side)
            if self.thumbnail:
                tiles, view = [*tiles, image], (lines, columns)
        pixels = [to_pixels(tile, self.settings) for tile in tiles]
        return Read(arrays=tile_arrays(pixels, view), tokens=self.tokens * len(tiles), text=self._marked(len(tiles)))

    def video(self, video: Video) -> Read:
        """Every frame of the video becomes one tile."""
        if self.frame is None:
            raise InputError(NO_VIDEO)
        frames = [to_pixels(open_image(frame), self.frame) for frame in video.frames]
        text = "\n".join(f"Frame{i}: {self._marked(1)}" for i in range(1, len(frames) + 1))
        return Read(arrays=tile_arrays(frames, is_video=True), tokens=self.tokens * len(frames), text=text)

    def _marked(self, tiles: int) -> str:
        return f"<img>{TOKEN * (self.tokens * tiles)}</img>"


def tiling(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and lines of the `fewest` to `most` tiles whose aspect ratio is nearest to that of the image.

    Sizes are in pixels; `side` is that of a tile. Between equally near tilings, the larger one is chosen if the image
    has more than half as many pixels.
    """
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if fewest <= i * j <= most]
    best, nearest = (1, 1), float("inf")
    for columns, lines in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / lines)
        larger = width * height > 0.5 * side * side * columns * lines
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (columns, lines), distance
    return best


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVitConfig(VitConfig):
    """InternViT: 300M (LayerNorm) or 6B (RMSNorm, normalised queries and keys); no norm follows the last block."""

    norm: str = dataclasses.field()  # "layer_norm" or "rms_norm"
    qkv_bias: bool = dataclasses.field()
    qk_norm_eps: float | None = None
    feature_layer: int = -1

    class_token = True
    scaled = True
    defaults: ClassVar = class_defaults("internvl")["internvl_vision"]

    def __post_init__(self) -> None:
        require("vision_config.norm_type", self.norm, "layer_norm", "rms_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVlWiring:
    """InternVL's own settings."""

    merge: int  # patches per side that become one vision token
    min_tiles: int = 1  # of an image, without the thumbnail
    max_tiles: int = 12
    thumbnail: bool = True  # an image that is cut into several tiles is followed by a thumbnail of the whole
    conversation: str | None = None  # name of the prompt format; None: the checkpoint has a chat template

    @classmethod
    def of(cls, raw: Raw, vision: VitConfig, **settings: Any) -> InternVlWiring:
        """The settings; InputError unless the inverse of `downsample_ratio` divides the patches per side."""
        ratio = raw.get("downsample_ratio", 0.5)
        if not isinstance(ratio, int | float) or not 0 < ratio <= 1 or (1 / ratio) % 1 or vision.grid % int(1 / ratio):
            raise InputError(f"config.json: downsample_ratio={ratio!r} must be 1/n, where n divides the "
                             f"{vision.grid} patches per side")  # fmt: skip
        return cls(merge=int(1 / ratio), **settings)


class InternVlConfig(InternTilesConfig):
    """An InternViT tower and any decoder."""

    # Without the system message of the authors' form, as transformers converts checkpoints.
    prompt_format = stored("chatml")

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require_all(raw, {"projector_hidden_act": "gelu", "vision_feature_select_strategy": "default"})
        tower = raw.get("vision_config") or {}
        require_all(tower, {"use_mean_pooling": True, "use_absolute_position_embeddings": True}, "vision_config.")
        c = filled(tower, InternVitConfig.defaults)
        vision = InternVitConfig.from_hf(
            tower, raw.get("vision_feature_layer", -1), norm=c["norm_type"], qkv_bias=bool(c["attention_bias"]),
            # transformers always uses the default epsilon for these norms and ignores layer_norm_eps
            qk_norm_eps=1e-6 if c["use_qk_norm"] else None,
        )  # fmt: skip
        return {
            "decoder": read_decoder({"tie_word_embeddings": True, **raw}, "qwen2"),  # the family's defaults
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", default=151667),
            "wiring": InternVlWiring.of(raw, vision),
        }


class _ChatVitConfig(InternVitConfig):
    """InternViT with the defaults of the authors' class."""

    defaults: ClassVar = class_defaults("internvl")["intern_vit_6b"]


class InternVlChatConfig(InternTilesConfig):
    """The form of `config.json` that the authors' code reads."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        decoder = read_decoder({"text_config": raw.get("llm_config")})
        # Not supported: an older pixel shuffle, and LoRA weights that are not merged.
        require("ps_version", raw.get("ps_version", "v1"), "v2")
        for field in ("use_backbone_lora", "use_llm_lora", "pad2square"):
            require(field, int(raw.get(field, 0)), 0)
        tower = raw.get("vision_config") or {}
        c = filled(tower, _ChatVitConfig.defaults)
        vision = _ChatVitConfig.from_hf(
            tower, raw.get("select_layer", -1), norm=c["norm_type"], qkv_bias=bool(c["qkv_bias"]),
            qk_norm_eps=c["layer_norm_eps"] if c["qk_normalization"] else None,
        )  # fmt: skip
        require("force_image_size", raw.get("force_image_size") or vision.image_size, vision.image_size)
        require("template", raw.get("template"), *CONVERSATIONS)
        tiled = bool(raw.get("dynamic_image_size", False))
        fewest = positive("min_dynamic_patch", raw.get("min_dynamic_patch", 1)) if tiled else 1
        most = positive("max_dynamic_patch", raw.get("max_dynamic_patch", 6)) if tiled else 1
        if fewest > most:
            raise InputError(f"config.json: min_dynamic_patch={fewest} is above max_dynamic_patch={most}")
        return {
            "decoder": decoder,
            "vision": vision,
            "image_token": _id(raw, TOKEN),
            "stop": (_id(raw, CONVERSATIONS[raw["template"]]["separator"].strip()),),
            "wiring": InternVlWiring.of(raw, vision, min_tiles=fewest, max_tiles=most, conversation=raw["template"],
                                        thumbnail=bool(raw.get("use_thumbnail", False))),
        }  # fmt: skip

    def template(self, folder: Path) -> ChatTemplate:
        """The chat template of the conversation that the config names; the folder has none."""
        text = f"{{% set c = {json.dumps(CONVERSATIONS[self.wiring.conversation])} %}}" + stored("internvl")
        return ChatTemplate.from_text(text, "config.json: template")

    @override
    def settings(self, folder: Path) -> RawSettings:
        # The authors' constants, because no file contains them.
        fields = dict(size={"height": self.vision.image_size, "width": self.vision.image_size},
                      image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225),
                      min_patches=self.wiring.min_tiles, max_patches=self.wiring.max_tiles)  # fmt: skip
        return RawSettings(fields, str(folder / "config.json"), _KINDS, KIND)

    @override
    def video_settings(self, folder: Path) -> RawSettings:
        return self.settings(folder)


def _id(raw: Raw, token: str) -> int:
    number = (raw.get("added_tokens") or {}).get(token)
    if not is_token_id(number):
        raise InputError(f"the id of {token} is not in tokenizer.json, tokenizer_config.json or added_tokens.json; "
                         "copy them from the checkpoint")  # fmt: skip
    return number


class InternVlProjector(Mlp):
    """LayerNorm, linear, exact (erf) GELU, linear."""

    def __init__(self, width_in: int, width_out: int, *, init: Initializer) -> None:
        self.norm = LayerNorm(width_in, 1e-5, init=init)
        super().__init__(width_in, width_out, width_out, init=init)

    @override
    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch D"]:
        return super().__call__(self.norm(x))


class InternVl(ShuffledModel):
    """Pixel shuffle, and a projector of two layers."""

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return InternVlProjector(config.vision.width * config.wiring.merge**2, config.decoder.width, init=init)


FAMILIES = {
    "internvl": Family(config=InternVlConfig, model=InternVl, names=stored_names("internvl")),
    "internvl_chat": Family(config=InternVlChatConfig, model=InternVl, names=stored_names("internvl_chat")),
}
