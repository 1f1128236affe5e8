"""SmolVLM, SmolVLM2, Idefics3 and granite-docling: SigLIP over tiles, pixel shuffle, one linear map, a Llama decoder.

An image is cut into square tiles, line by line, with a view of the whole image at the end. Only the tokens of tiles are
vision tokens. The marks around them are text: `<fake_token_around_image>`, `<row_1_col_1>`, `<global-img>` and line
breaks. So are the sentence before a video and the time before each of its frames; each frame is one tile. Images are
resized by PIL.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from flax import nnx
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.config import ModelConfig, Raw, positive, require, token_id
from vlkv.decoder.layers import Initializer, Linear
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import read_decoder
from vlkv.families.family import Family
from vlkv.families.models import ShuffledModel
from vlkv.families.names import stored_names
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, tiles_of
from vlkv.processing.pixels import (
    NO_VIDEO,
    Layout,
    PictureKind,
    PixelSettings,
    RawSettings,
    find_settings,
    find_video_settings,
    to_pixels,
)
from vlkv.processing.templates import ChatTemplate, stored
from vlkv.processing.tiles import TilesConfig, tile_arrays
from vlkv.towers.vit import NormedVit, SiglipConfig

TOKEN, AROUND = "<image>", "<fake_token_around_image>"
_LARGEST = 4096  # pixels; transformers limits the longer side of an image to this
# Class defaults in transformers, for fields that a file leaves out.
_DEFAULTS: dict[str, Any] = dict(
    resample=1, image_mean=0.5, image_std=0.5, size={"longest_edge": 4 * 364}, max_image_size={"longest_edge": 364},
    do_image_splitting=True,
)  # fmt: skip
_IMAGE, _VIDEO = "SmolVLMImageProcessor", "SmolVLMVideoProcessor"
_KINDS = dict.fromkeys(("Idefics3ImageProcessor", _IMAGE, _VIDEO), _DEFAULTS)
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_UNITS = ("", *f"one two three four five six seven eight nine {_TEENS}".split())
_TENS = ("", "", *["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"])
_TOWERS = ("idefics3_vision", "smolvlm_vision", "idefics3", "smolvlm")  # earlier versions wrote the last two


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVlmVisionConfig(SiglipConfig):
    """SigLIP with its last norm.

    In transformers, line i of n has the position of bucket i / n in a table of n lines. Tiles are always whole here, so
    this is line i. Float32 rounding in transformers moves some patches by one line for a few values of n, depending on
    the processor (25 on a CPU with AVX2), but for none that is published (26, 27, 32).
    """

    feature_layer: int = -1

    defaults: ClassVar = SiglipConfig.defaults | dict(
        model_type="idefics3_vision", hidden_size=1152, num_attention_heads=16, patch_size=32)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVlmWiring:
    """The setting that only this family has; `SmolVlmConfig.wiring`."""

    merge: int  # patches per side that become one vision token


class SmolVlmConfig(TilesConfig):
    """A SigLIP tower over tiles with marks, and a Llama decoder; they differ in sizes and in their `model_type`."""

    # Transformers writes every conversation with videos by this template, also if the folder has another one.
    prompt_format = stored("smolvlm")

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        tower = raw.get("vision_config") or {}
        require("vision_config.model_type", tower.get("model_type", _TOWERS[0]), *_TOWERS)
        vision = SmolVlmVisionConfig.from_hf({**tower, "model_type": _TOWERS[0]}, -1, whole=False)
        merge = positive("scale_factor", raw.get("scale_factor", 2))
        if vision.grid % merge:
            raise InputError(f"config.json: scale_factor={merge} must divide the {vision.grid} patches per side")
        if raw.get("text_config") is None:  # the family's default, for a file without the decoder's part
            raw = {**raw, "text_config": {"rms_norm_eps": 1e-5}}
        return {
            "decoder": read_decoder({"tie_word_embeddings": False, **raw}),
            "vision": vision,
            "image_token": token_id(raw, "image_token_id", default=128257),
            "wiring": SmolVlmWiring(merge=merge),
        }

    @override
    def template(self, folder: Path) -> ChatTemplate | None:
        template, videos = super().template(folder), ChatTemplate.from_text(self.prompt_format, "the format of videos")
        return template and dataclasses.replace(template, of_videos=videos)

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout)
        settings: dict[PictureKind, Resizing] = {"image": self.resizing(find_settings(folder, _KINDS, _IMAGE), "image")}
        video = find_video_settings(folder, _KINDS, _VIDEO)
        if video is not None:
            settings["video"] = self.resizing(video, "video")
        return SmolVlmPictures(settings=settings, tokens=self.per_picture)

    def resizing(self, raw: RawSettings, kind: PictureKind) -> Resizing:
        """The settings of an image or video processor; InputError unless tiles have the tower's size."""
        if kind == "video" and raw.fields.get("size") is None:
            size = (raw.fields.get("video_sampling") or {}).get("video_size", _DEFAULTS["size"])
            raw = raw._replace(fields={**raw.fields, "size": size})
        s, side = raw.filled(), self.vision.image_size
        if _longest_edge(s["max_image_size"], "max_image_size", raw) != side:
            raise raw.mismatch(f"tiles of {s['max_image_size']} pixels", f"takes {side} x {side}")
        split = s["do_image_splitting"]
        if not isinstance(split, bool | None):
            raise raw.error(f"do_image_splitting={split!r} must be true or false")
        return Resizing(
            edge=_longest_edge(s["size"], "size", raw) if s["do_resize"] else None, side=side,
            split=bool(split) and kind == "image",
            # transformers' processor of this family ignores `do_center_crop`.
            square=raw.pixels(size={"height": side, "width": side}, do_resize=True, do_center_crop=False),
        )  # fmt: skip

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `TilesConfig.arrange`, for `pixel_values` [B, tiles, 3, h, w], in which rows may have tiles of padding.

        `pixel_attention_mask` marks padding with zeros. As in transformers, tiles of zeros are padding too.
        """
        if batch.get("pixel_values") is not None and np.ndim(batch["pixel_values"]) == 5:
            pixels, mask = np.asarray(batch["pixel_values"], np.float32), batch.get("pixel_attention_mask")
            used = pixels.any(axis=(2, 3, 4))
            if mask is not None and not np.asarray(mask)[used].all():
                raise InputError("pixel_attention_mask: part of a tile is padding; resize tiles to whole squares, as "
                                 "the family's processor does")  # fmt: skip
            batch = {**batch, "pixel_values": pixels[used] if used.any() else None}
        return super().arrange(batch, tokens, valid, buckets)


def _longest_edge(size: object, field: str, raw: RawSettings) -> int:
    """The number of pixels in a setting `{"longest_edge": pixels}`. A bare number means a square in transformers."""
    edge = size.get("longest_edge") if isinstance(size, Mapping) and set(size) == {"longest_edge"} else None
    if not isinstance(edge, int) or isinstance(edge, bool) or not 1 <= edge <= _LARGEST:
        raise raw.error(f"{field}={size!r} is not supported (only longest_edge, 1 to {_LARGEST} pixels)")
    return edge


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resizing:
    """Settings of the image processor, or of the video processor."""

    edge: int | None  # pixels of an image's longer side after the first resizing; None: it is skipped
    side: int  # pixels of a tile
    split: bool  # cut images into tiles
    square: PixelSettings  # makes a tile of the tower's size from any image

    def first(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """The image with a longer side of `edge` pixels, and an even number of pixels on the other side."""
        if self.edge is None:
            return image
        width, height = _scaled(*image.size, self.edge)
        if image.width >= image.height:
            return self._resized(image, width, height + height % 2)
        return self._resized(image, width + width % 2, height)

    def second(self, image: PIL.Image.Image) -> PIL.Image.Image:
        """The image with sides that are multiples of a tile's."""
        longer = math.ceil(max(image.size) / self.side) * self.side
        width, height = (math.ceil(x / self.side) * self.side for x in _scaled(*image.size, longer))
        return self._resized(image, width, height)

    def _resized(self, image: PIL.Image.Image, width: int, height: int) -> PIL.Image.Image:
        check_area(width, height, f"the {image.width} x {image.height} image, after resizing")
        return image.resize((max(width, 1), max(height, 1)), resample=self.square.resample)


def _scaled(width: int, height: int, longer: int) -> tuple[int, int]:
    """Width and height in pixels after scaling to the given longer side; the shorter one is rounded down."""
    ratio = width / height  # transformers divides and multiplies by this rounded number
    return (longer, int(longer / ratio)) if width >= height else (int(longer * ratio), longer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolVlmPictures(Pictures):
    """Converts images and videos to tiles, and writes their marks."""

    spelled: ClassVar[Mapping[str, str]] = {"video": "<video>"}

    settings: Mapping[PictureKind, Resizing]
    tokens: int  # vision tokens of a tile

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """The image becomes its tiles and a view of the whole; a small one, or one that is not cut, only the view."""
        s = self.settings["image"]
        image = s.first(image)
        if s.split:
            image = s.second(image)
        tiles = tiles_of(image, s.side) if s.split and max(image.size) > s.side else []
        lines, columns = (image.height // s.side, image.width // s.side) if tiles else (0, 0)
        text = ""
        for line in range(1, lines + 1):
            text += "".join(self._tile(f"row_{line}_col_{column}") for column in range(1, columns + 1)) + "\n"
        return self._read([*tiles, image], s, text + "\n" * bool(tiles) + self._whole, view=(lines, columns))

    def video(self, video: Video) -> Read:
        """Every frame of the video becomes one tile after its time, `frames / fps` seconds in all.

        A part of a longer video has a sentence of its own, with the number of its frames and the seconds so far.
        """
        if "video" not in self.settings:
            raise InputError(NO_VIDEO)
        s, seconds = self.settings["video"], len(video.frames) / video.fps
        if video.begin is not None:
            seconds = video.seconds[-1] + 1 / video.fps
        frames = [s.first(open_image(frame)) for frame in video.frames]
        text = (f"You are provided the following series of {in_words(len(frames))} frames from a "
                f"{datetime.timedelta(seconds=int(seconds))} [H:MM:SS] video.\n")  # fmt: skip
        for time in video.seconds:
            minute, second = divmod(int(time), 60)
            text += f"\nFrame from {minute:02d}:{second:02d}:{self._whole}"
        return self._read(frames, s, text + "\n\n", is_video=True)

    @override
    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        arrays = super().batch(reads)
        return {**arrays, "pixel_values": arrays["pixel_values"][None]} if reads else arrays

    def _tile(self, mark: str) -> str:
        return f"{AROUND}<{mark}>{TOKEN * self.tokens}"

    @property
    def _whole(self) -> str:
        return self._tile("global-img") + AROUND

    def _read(self, tiles: list[PIL.Image.Image], s: Resizing, text: str, **options: Any) -> Read:
        arrays = tile_arrays([to_pixels(tile, s.square) for tile in tiles], **options)
        return Read(arrays=arrays, tokens=self.tokens * len(tiles), text=text)


def in_words(number: int) -> str:
    """A number from 1 to 999 in English words, as SmolVLM2 writes the number of frames."""
    if number > 999:
        raise InputError(f"a video of {number} frames: give at most 999, such as read_video(path, frames=64)")
    hundreds, below = divmod(number, 100)
    words = _UNITS[below] if below < 20 else "-".join(filter(None, (_TENS[below // 10], _UNITS[below % 10])))
    return " and ".join(filter(None, (f"{_UNITS[hundreds]} hundred" if hundreds else "", words)))


class SmolVlm(ShuffledModel):
    """Pixel shuffle, then one linear map without a bias."""

    tower = NormedVit

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        merged = config.vision.width * config.wiring.merge**2
        return Linear(merged, config.decoder.width, bias=False, init=init)


_FAMILY = Family(config=SmolVlmConfig, model=SmolVlm, names=stored_names("smolvlm"))
FAMILIES = dict.fromkeys(("idefics3", "smolvlm"), _FAMILY)
