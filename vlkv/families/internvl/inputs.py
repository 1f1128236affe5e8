"""InternVL's images: cut into square tiles, on the tiling that distorts them least, with a thumbnail at the end.

Every tile and the thumbnail are separate images in `Inputs.grid`, because the tower sees each of them alone and no
token contains the position of a tile. Our processor adds `pixel_tiles`; transformers' processor does not. From it
follows `Inputs.tiles`, for methods that divide a budget among the tiles of an image. Likewise `Inputs.frame`, for
methods that compare the frames of a video, follows from `pixel_frames`. Only the tokens of tiles are vision tokens. The
marks `<img>` and `</img>` around an image are text. So is `Frame1: ` before a frame of a video; each frame is one tile.
Images are resized by PIL, as in the authors' code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from jaxtyping import Float
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.errors import InputError
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, cells, tile_numbers
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, tiles_of
from vlkv.processing.pixels import (
    NO_VIDEO,
    Layout,
    PixelSettings,
    find_settings,
    find_video_settings,
    to_pixels,
    with_defaults,
)
from vlkv.processing.squares import SquareConfig

TOKEN = "<IMG_CONTEXT>"
# Class defaults in transformers, for fields that a file leaves out.
KIND = "GotOcr2ImageProcessor"
_DEFAULTS = dict(size={"height": 384, "width": 384}, do_center_crop=False, crop_size=None, default_to_square=True)
_VIDEO_KIND = "InternVLVideoProcessor"
_KINDS = {KIND: dict(_DEFAULTS, min_patches=1, max_patches=12), _VIDEO_KIND: _DEFAULTS}


class TilesConfig(SquareConfig):
    """Images as tiles, whose merged patches are the vision tokens."""

    @property
    @override
    def side(self) -> int:
        return self.vision.grid // self.wiring.merge

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
            raise InputError(f"{source}: tiles of {settings.size} pixels, but the tower in config.json takes "
                             f"{side} x {side}: the files belong to different checkpoints")  # fmt: skip
        return settings

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `SquareConfig.arrange`. `batch` may also have `pixel_tiles` [I, 2] and `pixel_frames` [I].

        `pixel_tiles`: for a thumbnail, the lines and columns of the tiles before it; for a tile, zeros. `pixel_frames`:
        for a frame of a video, its number in the video, from 0; for a tile or a thumbnail, -1.
        """
        arranged = super().arrange(batch, tokens, valid, buckets)
        numbers = np.asarray(batch.get("pixel_frames", -1))
        if (numbers >= 0).any():
            of_embedding, index = np.repeat(numbers, self.per_picture), arranged.vision_index
            frame = np.where(index >= 0, of_embedding[index], -1).astype(np.int32)
            arranged = dataclasses.replace(arranged, frame=frame)
        if batch.get("pixel_tiles") is None:
            return arranged
        tilings = np.asarray(batch["pixel_tiles"])
        shown = np.full((len(tilings), self.per_picture), -1)
        for view in np.flatnonzero(tilings.prod(axis=1)):
            shown[view] = view - tilings[view].prod() + cells(self.side, *tilings[view]).ravel()
        tile = np.repeat(np.arange(len(tilings)), self.per_picture)
        return dataclasses.replace(arranged, tiles=tile_numbers(arranged.vision_index, tile, shown.ravel()))

    def settings(self, folder: Path) -> tuple[dict[str, Any], str]:
        """The settings of a folder's image processor, and the file that contains them."""
        return find_settings(folder)  # transformers' processor of this family sets `crop_to_patches`, so it is ignored

    def video_settings(self, folder: Path) -> tuple[dict[str, Any], str] | None:
        """Likewise of its video processor; None if it has none."""
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


def tile_arrays(
    tiles: Sequence[Float[np.ndarray, "3 side side"]], view: tuple[int, int] = (0, 0), *, is_video: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of one image or video, as `TilesConfig.arrange` gets them.

    Args:
        tiles: those of an image, or the frames of a video.
        view: lines and columns of the tiles before the last one, if this is a view of the whole image.
        is_video: whether they are frames.
    """
    return {
        "pixel_values": np.stack(tiles),
        "pixel_tiles": np.array([*[(0, 0)] * (len(tiles) - 1), view]),
        "pixel_frames": np.arange(len(tiles)) if is_video else np.full(len(tiles), -1),
    }


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
