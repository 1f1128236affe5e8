"""InternVL's images: cut into square tiles, on the tiling that distorts them least, with a thumbnail at the end.

Only the tokens of tiles are vision tokens. The marks `<img>` and `</img>` around an image are text. So is `Frame1: `
before a frame of a video; each frame is one tile. Images are resized by PIL, as in the authors' code.

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
from typing_extensions import override

from vlkv.errors import InputError
from vlkv.files import DATA
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, tiles_of
from vlkv.processing.pixels import (
    NO_VIDEO,
    Layout,
    PixelSettings,
    find_settings,
    find_video_settings,
    mismatch,
    to_pixels,
    with_defaults,
)
from vlkv.processing.tiles import TilesConfig, tile_arrays

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
        (raw, source), video = self.settings(folder), self.video_settings(folder)
        raw = with_defaults(raw, source, _KINDS, KIND)
        for field in ("min_patches", "max_patches"):
            if not isinstance(raw[field], int) or raw[field] < 1:
                raise InputError(f"{source}: {field}={raw[field]!r} must be a whole number of at least 1")
        if raw["min_patches"] > raw["max_patches"]:
            raise InputError(f"{source}: min_patches={raw['min_patches']} is above max_patches={raw['max_patches']}")
        return InternVlPictures(
            settings=self._square(raw, source), frame=None if video is None else self._square(*video),
            side=self.vision.image_size,
            tokens=self.per_picture, min_tiles=raw["min_patches"], max_tiles=raw["max_patches"],
            thumbnail=self.wiring.thumbnail,
        )  # fmt: skip

    def _square(self, raw: dict[str, Any], source: str) -> PixelSettings:
        """The settings for one tile or frame; InputError unless they resize to the tower's size."""
        settings, side = PixelSettings.from_hf(raw, source, kinds=_KINDS, default=KIND), self.vision.image_size
        if settings.size is None or settings.crop is not None:
            raise InputError(f"{source}: do_resize=False and do_center_crop=True are not supported")
        if settings.size != (side, side):
            raise mismatch(source, f"tiles of {settings.size} pixels", f"takes {side} x {side}")
        return settings

    def settings(self, folder: Path) -> tuple[dict[str, Any], str]:
        """The settings of a folder's image processor, and the file that contains them."""
        return find_settings(folder)  # transformers' processor of this family sets `crop_to_patches`, so it is ignored

    def video_settings(self, folder: Path) -> tuple[dict[str, Any], str] | None:
        """The settings of a folder's video processor, and the file that contains them; None if there are none."""
        return find_video_settings(folder, _KINDS)


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
