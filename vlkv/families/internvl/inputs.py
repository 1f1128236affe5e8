"""InternVL's pictures: cut into square tiles on the grid that distorts them least, the whole once more at the end.

Every tile is an image of its own on the grid, the thumbnail (the last, where there are several) too: the tower sees
them apart, and no token says where a tile lay in its picture. Our own processor says it beside the pixels
(`pixel_tiles`), for methods that share a budget among the tiles of a picture (`Inputs.parts`); transformers' does not.
Only the tiles' tokens are vision; the marks `<img>` and `</img>` around a picture, and the `Frame1: ` of a video, whose
frames are one tile each, are text. Resizing is PIL's, as in the original and in transformers' processor on PIL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image

from vlkv.buckets import Buckets
from vlkv.config import filled
from vlkv.errors import InputError
from vlkv.processing.arranging import Arranged, Batch, Mask, SquareInputs, Tokens, cells, parts_of
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, tiles_of
from vlkv.processing.pixels import Layout, PixelSettings, find_settings, to_pixels

TOKEN = "<IMG_CONTEXT>"
# The class defaults of transformers, which a file may leave out.
KIND = "GotOcr2ImageProcessor"
_KINDS = {KIND: dict(size={"height": 384, "width": 384}, do_center_crop=False)}
_TILES = dict(min_patches=1, max_patches=12)


class InternVlInputs(SquareInputs):
    """Tiles of merged patches."""

    @property
    def side(self) -> int:
        """Tokens per side of a tile."""
        return self.vision.grid // self.wiring.merge

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        """Tiles as the folder's settings say."""
        self.only_checkpoint(layout)
        side, (raw, source) = self.vision.image_size, self.settings(folder)
        settings = PixelSettings.from_hf(raw, source, kinds=_KINDS)
        if settings.size != (side, side):
            raise InputError(f"{source}: tiles of {settings.size} pixels, but the tower in config.json takes "
                             f"{side} x {side}: the files are not of one checkpoint")  # fmt: skip
        return InternVlPictures(settings=settings, side=side, tokens=self.per_picture, min_tiles=raw["min_patches"],
                                max_tiles=raw["max_patches"], thumbnail=self.wiring.thumbnail)  # fmt: skip

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """As for squares; with `pixel_tiles` [I, 2], which says of how many lines and columns of tiles, those just
        before it, a thumbnail is the view: zeros for all other tiles.
        """
        made = super().arrange(batch, tokens, valid, buckets)
        if batch.get("pixel_tiles") is None:
            return made
        given = np.asarray(batch["pixel_tiles"])
        shown = np.full((len(given), self.per_picture), -1)
        for view in np.flatnonzero(given.prod(axis=1)):
            shown[view] = view - given[view].prod() + cells(self.side, *given[view]).ravel()
        tile = np.repeat(np.arange(len(given)), self.per_picture)
        return dataclasses.replace(made, parts=parts_of(made.vision_index, tile, shown.ravel()))

    def settings(self, folder: Path) -> tuple[dict[str, Any], str]:
        """What is done to a picture, and the file that says it."""
        found, source = find_settings(folder)
        raw = filled(found, {"image_processor_type": KIND, **_TILES})
        # `crop_to_patches` decides nothing: transformers' processor of the family always sets it.
        if not raw.get("do_resize", True) or raw.get("do_center_crop"):
            raise InputError(f"{source}: do_resize=False and do_center_crop=True are not supported")
        for field in ("min_patches", "max_patches"):
            if not isinstance(raw[field], int) or raw[field] < 1:
                raise InputError(f"{source}: {field}={raw[field]!r} must be a whole number of at least 1")
        if raw["min_patches"] > raw["max_patches"]:
            raise InputError(f"{source}: min_patches={raw['min_patches']} is above max_patches={raw['max_patches']}")
        return raw, source


@dataclasses.dataclass(frozen=True, kw_only=True)
class InternVlPictures(Pictures):
    """Reads pictures as the checkpoint says."""

    spelled: ClassVar[Mapping[str, str]] = {"video": "<video>"}

    settings: PixelSettings  # of one tile
    side: int  # pixels of a tile
    tokens: int  # vision tokens of a tile
    min_tiles: int
    max_tiles: int
    thumbnail: bool

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """Its tiles."""
        tiles = [to_pixels(tile, self.settings) for tile in self.cut(image)]
        columns, lines = self._tiling(image)
        view = (lines, columns) if len(tiles) > lines * columns else (0, 0)
        return self._made(tiles, self._marked(len(tiles)), view)

    def video(self, video: Video) -> Read:
        """Its frames, a tile each."""
        frames = [to_pixels(open_image(frame), self.settings) for frame in video.frames]
        return self._made(frames, "\n".join(f"Frame{i}: {self._marked(1)}" for i in range(1, len(frames) + 1)))

    def cut(self, image: PIL.Image.Image) -> list[PIL.Image.Image]:
        """The tiles of a picture, line by line, and the picture itself as the thumbnail (not resized yet)."""
        columns, lines = self._tiling(image)
        if columns * lines == 1:
            return [image]
        width, height = columns * self.side, lines * self.side
        check_area(width, height, f"the {image.width} x {image.height} image, once resized")
        tiles = tiles_of(image.resize((width, height), resample=self.settings.resample), self.side)
        return [*tiles, image] if self.thumbnail else tiles

    def _tiling(self, image: PIL.Image.Image) -> tuple[int, int]:
        return tiling(image.width, image.height, self.side, self.min_tiles, self.max_tiles)

    def _marked(self, tiles: int) -> str:
        return f"<img>{TOKEN * (self.tokens * tiles)}</img>"

    def _made(self, tiles: list[np.ndarray], text: str, view: tuple[int, int] = (0, 0)) -> Read:
        lines_columns = np.array([*[(0, 0)] * (len(tiles) - 1), view])
        arrays = {"pixel_values": np.stack(tiles), "pixel_tiles": lines_columns}
        return Read(arrays=arrays, tokens=self.tokens * len(tiles), text=text)


def tiling(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """Columns and lines of tiles, from `fewest` to `most` of them, whose aspect ratio is nearest to the picture's.

    Args:
        width: of the picture, in pixels.
        height: of the picture, in pixels.
        side: of a tile, in pixels.
        fewest: tiles.
        most: tiles. Among equally near grids the larger wins if the picture has more than half its pixels.
    """
    grids = [(i, j) for i in range(1, most + 1) for j in range(1, most + 1) if fewest <= i * j <= most]
    best, nearest = (1, 1), float("inf")
    for columns, lines in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / lines)
        larger = width * height > 0.5 * side * side * columns * lines
        if distance < nearest or (distance == nearest and larger):
            best, nearest = (columns, lines), distance
    return best
