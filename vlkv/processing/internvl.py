"""InternVL's pictures: cut into square tiles on the grid that distorts them least, the whole once more at the end.

A video's frames are one tile each. In the prompt a picture stands between `<img>` and `</img>`, a frame behind
`Frame1: ` as well. Resizing is PIL's, as in the original and in transformers' processor on PIL.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image

from vlkv.config import InternVitConfig, ModelConfig
from vlkv.errors import InputError
from vlkv.processing.images import Picture, check_area, open_image
from vlkv.processing.pictures import Read, Video
from vlkv.processing.pixels import Layout, PixelSettings, find_settings, to_pixels
from vlkv.processing.templates import ChatTemplate

_START, _TOKEN, _END = "<img>", "<IMG_CONTEXT>", "</img>"
_KIND = "GotOcr2ImageProcessor"
# The class defaults of transformers, which a file may leave out; those of the original checkpoints stand in no file.
_DEFAULTS: dict[str, Any] = dict(
    size={"height": 384, "width": 384}, resample=3, min_patches=1, max_patches=12,
    image_mean=(0.48145466, 0.4578275, 0.40821073), image_std=(0.26862954, 0.26130258, 0.27577711),
)  # fmt: skip
_IMAGENET = dict(image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225))


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVlPictures:
    """Reads pictures as the checkpoint says."""

    # Pictures of this kind stand in the prompt as text alone: the tokenizer need not know the token.
    spelled: ClassVar[Mapping[str, str]] = {"video": "<video>"}

    settings: PixelSettings  # of one tile
    side: int  # pixels of a tile
    tokens: int  # vision tokens of a tile
    min_tiles: int
    max_tiles: int
    thumbnail: bool

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, layout: Layout) -> InternVlPictures:
        """Reads the settings; raises InputError where they are missing or not honoured."""
        assert isinstance(config.vision, InternVitConfig)
        if layout != "checkpoint":
            raise InputError(f"layout={layout!r} is not for this model, which cuts pictures into tiles; leave it out")
        wiring, side = config.wiring, config.vision.image_size
        if wiring.conversation is not None:  # an original checkpoint: all is in its config
            raw, source = {**_DEFAULTS, **_IMAGENET, "size": side}, str(folder / "config.json")
            raw |= {"min_patches": wiring.min_tiles, "max_patches": wiring.max_tiles}
        else:
            raw, source = _read_settings(folder)
        settings = PixelSettings.from_hf(_of_a_tile(raw, source), source)
        if settings.size != (side, side):
            raise InputError(f"{source}: tiles of {settings.size} pixels, but the tower in config.json takes "
                             f"{side} x {side}: the files are not of one checkpoint")  # fmt: skip
        return cls(
            settings=settings,
            side=side,
            tokens=wiring.tokens,
            min_tiles=raw["min_patches"],
            max_tiles=raw["max_patches"],
            thumbnail=wiring.thumbnail,
        )

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """One picture or video; how many `images` its prompt has does not matter."""
        del images
        if isinstance(picture, Video):
            frames = [to_pixels(open_image(frame), self.settings) for frame in picture.frames]
            texts = [f"Frame{i}: {self._marked(1)}" for i in range(1, len(frames) + 1)]
            return self._made(frames, "\n".join(texts))
        image = open_image(picture)
        tiles = [to_pixels(tile, self.settings) for tile in self.cut(image)]
        return self._made(tiles, self._marked(len(tiles)))

    def cut(self, image: PIL.Image.Image) -> list[PIL.Image.Image]:
        """The tiles of a picture, line by line, and the picture itself as the thumbnail (not resized yet)."""
        columns, lines = tiling(image.width, image.height, self.side, self.min_tiles, self.max_tiles)
        if columns * lines == 1:
            return [image]
        width, height = columns * self.side, lines * self.side
        check_area(width, height, f"the {image.width} x {image.height} image, once resized")
        whole = image.resize((width, height), resample=self.settings.resample)
        corners = [(x, y) for y in range(0, height, self.side) for x in range(0, width, self.side)]
        tiles = [whole.crop((x, y, x + self.side, y + self.side)) for x, y in corners]
        return [*tiles, image] if self.thumbnail else tiles

    def batch(self, reads: Sequence[Read]) -> dict[str, np.ndarray]:
        """`pixel_values` [I, 3, h, w]: all tiles, as they stand in the prompts."""
        return {"pixel_values": np.concatenate([read.arrays["pixel_values"] for read in reads])} if reads else {}

    def _marked(self, tiles: int) -> str:
        return f"{_START}{_TOKEN * (self.tokens * tiles)}{_END}"

    def _made(self, tiles: list[np.ndarray], text: str) -> Read:
        return Read(arrays={"pixel_values": np.stack(tiles)}, tokens=self.tokens * len(tiles), text=text)


def tiling(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and lines of tiles, from `fewest` to `most` of them, whose aspect ratio is nearest to the picture's.

    Among equally near ones the larger wins if the picture has more than half its pixels.
    """
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if fewest <= i * j <= most]
    best, nearest = (1, 1), float("inf")
    for columns, lines in sorted(grids, key=_area):
        distance = abs(width / height - columns / lines)
        larger = width * height > 0.5 * side * side * columns * lines
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (columns, lines), distance
    return best


def template(config: ModelConfig) -> ChatTemplate:
    """The conversation of an original checkpoint, as a chat template."""
    c = config.wiring.conversation
    opening = {"user": c.user, "assistant": c.assistant}
    text = (
        f"{{{{ {json.dumps(c.system + c.separator)} }}}}"
        f"{{% for message in messages %}}{{{{ {json.dumps(opening)}[message.role] }}}}{{{{ message.content }}}}"
        f"{{{{ {json.dumps(c.separator)} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {json.dumps(c.assistant)} }}}}{{% endif %}}"
    )
    return ChatTemplate.from_text(text, "config.json: template")


def _area(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]


def _read_settings(folder: Path) -> tuple[dict[str, Any], str]:
    found, source = find_settings(folder)
    kind = str(found.get("image_processor_type", _KIND)).removesuffix("Fast").removesuffix("Pil")
    if kind != _KIND:
        raise InputError(f"{source}: image_processor_type={kind!r} is not supported (only {_KIND!r})")
    raw = {**_DEFAULTS, **{key: value for key, value in found.items() if value is not None}}
    # `crop_to_patches` decides nothing: transformers' processor of the family always sets it.
    if not raw.get("do_resize", True) or raw.get("do_center_crop"):
        raise InputError(f"{source}: do_resize=False and do_center_crop=True are not supported")
    for field in ("min_patches", "max_patches"):
        if not isinstance(raw[field], int) or raw[field] < 1:
            raise InputError(f"{source}: {field}={raw[field]!r} must be a whole number of at least 1")
    if raw["min_patches"] > raw["max_patches"]:
        raise InputError(f"{source}: min_patches={raw['min_patches']} is above max_patches={raw['max_patches']}")
    return raw, source


def _of_a_tile(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What is done to one tile; on those cut from a resized picture resizing has no effect."""
    size = raw["size"]
    if isinstance(size, int):
        size = {"height": size, "width": size}
    if not isinstance(size, dict) or set(size) != {"height", "width"}:
        raise InputError(f"{source}: size={size!r} must give height and width")
    kept = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
    return {**{key: raw[key] for key in kept if key in raw}, "size": size, "do_center_crop": False}
