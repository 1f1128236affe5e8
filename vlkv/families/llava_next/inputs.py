"""Images of LLaVA-NeXT, OneVision and Video, as an overview and as tiles; and frames of videos.

An image has two views. The overview is the whole image as one tile. The second view is the image at a higher
resolution, cut into tiles; the patches of the tiles are joined again line by line, without those that only show
padding, and a newline embedding follows every line. Each view is a separate image in `Inputs.grid`, and so is every
video frame. Lines and columns are counted over the whole view, not within a tile, so that LightKV's windows contain
patches that are neighbours in the image. Newlines count as vision tokens, because the prompt has an image token for
them. Their `grid` contains the number of their view, and -1 for line and column.

The vision embeddings of the batch are, in this order: the patches of all tiles and frames in raster order, the mixed
embeddings, the newline. A mixed embedding is a weighted sum of patches, the result of pooling or resizing:
`layout["taps"]` [M, taps] contains the patches, `layout["weights"]` [M, taps] their weights. M is rounded up to a
bucket. Both are missing for a family that does not mix patches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from jaxtyping import Float, Int
from typing_extensions import override

from vlkv.buckets import Buckets, round_up
from vlkv.errors import InputError
from vlkv.families.llava_form import LLAVA_KINDS
from vlkv.families.llava_next.anyres import best_resolution, bilinear, fitted, means, without_padding
from vlkv.processing.arranging import (
    OTHERS,
    PICTURE,
    Arranged,
    Batch,
    Mask,
    Tokens,
    arrange_entries,
    cells,
    entries,
    padded,
    tile_numbers,
    zeros,
)
from vlkv.processing.host import HostConfig
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, by_name, tiles_of, to_square
from vlkv.processing.pixels import CLIP, NO_VIDEO, Layout, PixelSettings, find_settings, find_video_settings


class AnyResConfig(HostConfig):
    """Images of any shape, and videos if the family supports them."""

    kind: ClassVar[str] = CLIP  # the image processor of a file that names none
    video_kind: ClassVar[str] = CLIP  # the video processor of a file that names none
    whole_batch: ClassVar = {"pixels": ("images",), "taps": ("vision",), "weights": ("vision",)}

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout)
        # Checkpoints in the authors' form have no settings; the tower was trained with these.
        side = self.vision.image_size
        size = {"height": side, "width": side}
        default = None if self.vision.class_token else {"image_processor_type": "SiglipImageProcessor", "size": size}
        settings = find_settings(folder, LLAVA_KINDS, self.kind, default)
        points = settings.filled().get("image_grid_pinpoints")
        if points is not None and points != [list(pair) for pair in self.wiring.pinpoints]:
            problem = "image_grid_pinpoints differ from those of config.json"
            raise settings.error(f"{problem}: the files belong to different checkpoints")
        image, video = settings.pixels(), None
        if image.tile != side:
            raise settings.mismatch(f"tiles of {image.tile} pixels", f"takes {side}")
        if self.wiring.video is not None:
            video = find_video_settings(folder, LLAVA_KINDS, self.video_kind)
            if video is None and default is not None:
                video = settings._replace(fields=default, default=self.video_kind)
        return LlavaNextPictures(config=self, settings=image, frame=None if video is None else video.pixels())

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `ModelConfig.arrange`. `batch` has arrays of images, of videos, or of both.

        Images: `pixel_values` [I, tiles, 3, h, w], whose padding tiles are ignored, or a list with a different number
        of tiles for each image; `image_sizes` [I, 2]; `batch_num_images`, the number of images of each prompt that has
        images (None: one each). Videos: `pixel_values_videos` [I, frames, 3, h, w].
        """
        views, pixels = Views(self), []
        by_token: dict[int | None, list[np.ndarray]] = {self.image_token: [], self.video_token: []}
        sizes, alone = _sizes(batch)
        for image, size, is_alone in zip(_list(batch, "pixel_values", len(sizes)), sizes, alone, strict=True):
            before = views.tiles
            by_token[self.image_token].append(views.picture(size, alone=is_alone))
            pixels.append(self._tiles("pixel_values", image, views.tiles - before, f"an image of {size} pixels"))
        videos = _list(batch, "pixel_values_videos")
        if videos and self.wiring.video is None:
            raise InputError(f"{self.family} does not support videos: give the frames as pixel_values")
        if videos and sizes and self.image_token == self.video_token:
            raise InputError(f"{self.family} has the same token for images and videos: "
                             "give a batch with only images or only videos")  # fmt: skip
        for video in videos:
            by_token[self.video_token].append(views.video(len(video)))
            pixels.append(self._tiles("pixel_values_videos", video, len(video), "a video"))
        layout, tiles = views.layout(buckets), round_up(views.tiles, buckets.images)
        mixed = tiles * self.vision.grid**2  # index of the first mixed embedding
        fields, _ = arrange_entries(
            tokens, valid, by_token, buckets, others=mixed, newline=mixed + len(layout.get("taps", ())),
            frames={self.video_token: [0] * len(videos)} if videos else {},
        )  # fmt: skip
        if pixels:
            numbers = tile_numbers(fields["vision_index"], *views.tables(tiles, len(layout.get("taps", ()))))
            fields |= {"pixels": padded(np.concatenate(pixels), tiles), "layout": layout, "tiles": numbers}
        return Arranged(**fields)

    @override
    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        # Several images are cut into tiles too, unless the family then shows only overviews.
        views, side = Views(self), self.vision.image_size
        per_image = len(views.picture(PICTURE, alone=pictures == 1))
        return {"pixel_values": [zeros(views.tiles, 3, side, side)] * pictures, "image_sizes": [PICTURE] * pictures,
                "batch_num_images": [pictures]}, pictures * per_image  # fmt: skip

    def _tiles(self, name: str, tiles: np.ndarray, count: int, what: str) -> np.ndarray:
        """The tiles without padding, the first `count`; InputError if there are fewer, or tiles of another size."""
        side = self.vision.image_size
        if tiles.ndim != 4 or tiles.shape[1:] != (3, side, side) or len(tiles) < count or not count:
            raise InputError(f"{name}: {what} has shape {tiles.shape}, expected [{count}, 3, {side}, {side}]")
        return tiles[:count]


class Views:
    """Assigns numbers to the patches and mixed embeddings of one batch, one image or video after the other."""

    def __init__(self, config: AnyResConfig) -> None:
        self.wiring = config.wiring
        self.side, self.grid = config.vision.image_size, config.vision.grid
        self.tiles = 0
        self.cut: list[tuple[int, int, int]] = []  # tile number of an overview; lines and columns of the tiles after it
        self.count = 0  # number of mixed embeddings
        self.taps = [np.zeros((0, self.wiring.taps), np.int32)]  # [m, taps] each, like the weights
        self.weights = [np.zeros((0, self.wiring.taps), np.float32)]

    def picture(self, size: tuple[int, int], *, alone: bool = True) -> Int[np.ndarray, "n 4"]:
        """The vision tokens of one image of `size` pixels, as `entries`. `alone`: it is the only one of its prompt."""
        overview = self._tiles(1, 1)
        if self.wiring.only_alone and not alone:
            return entries(overview, 0, "end")
        height, width = best_resolution(size, self.wiring.pinpoints)
        self.cut.append((self.tiles - 1, height // self.side, width // self.side))
        parts = self._tiles(height // self.side, width // self.side)
        parts = without_padding(parts, size, rounded=self.wiring.rounded)
        if self.wiring.most_tiles is not None:
            ratio = float(np.sqrt(parts.size / (self.wiring.most_tiles * self.grid**2)))
            if ratio > 1.1:  # as in transformers: a slightly larger image is not resized
                parts = self._mix(*bilinear(parts, (int(parts.shape[0] // ratio), int(parts.shape[1] // ratio))))
        return np.concatenate([entries(overview, 0), entries(parts, 1, "line")])

    def video(self, frames: int) -> Int[np.ndarray, "n 4"]:
        """The vision tokens of one video, as `entries`."""
        pooling, of_frames = self.wiring.video, []
        for frame in range(frames):
            field = self._tiles(1, 1)
            if pooling.mode == "bilinear":
                side = -(-self.grid // pooling.stride)
                field = self._mix(*bilinear(field, (side, side)))
            else:
                field = self._mix(*means(field, pooling.stride))
            ends = pooling.newline == "frame" or (pooling.newline == "video" and frame == frames - 1)
            of_frames.append(entries(field, frame, "line" if pooling.newline == "line" else "end" if ends else "none"))
        return np.concatenate(of_frames)

    def _tiles(self, rows: int, columns: int) -> Int[np.ndarray, "lines columns"]:
        """The patches of the next rows x columns tiles, as one array."""
        side, first = self.grid, self.tiles
        self.tiles += rows * columns
        patches = np.arange(first * side**2, self.tiles * side**2).reshape(rows, columns, side, side)
        return patches.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)

    def _mix(
        self, taps: Int[np.ndarray, "lines columns k"], weights: Float[np.ndarray, "lines columns k"]
    ) -> Int[np.ndarray, "lines columns"]:
        """Adds mixed embeddings; returns their sources as `entries` takes them: OTHERS, OTHERS - 1 and so on."""
        *shape, k = taps.shape
        for table, rows in ((self.taps, taps), (self.weights, weights)):
            flat = np.zeros((shape[0] * shape[1], self.wiring.taps), table[0].dtype)
            flat[:, :k] = rows.reshape(-1, k)
            table.append(flat)
        first, self.count = self.count, self.count + shape[0] * shape[1]
        return OTHERS - np.arange(first, self.count).reshape(shape)

    def tables(self, tiles: int, mixed: int) -> tuple[Int[np.ndarray, " R"], Int[np.ndarray, " R"]]:
        """The arguments `tile` and `shown` of `tile_numbers`. A mixed embedding is in the tile of its heaviest patch.

        `tiles` and `mixed`: numbers of tiles and of mixed embeddings of the batch, with padding.
        """
        tile = np.repeat(np.arange(tiles), self.grid**2)
        shown = np.full((tiles, self.grid**2), -1)
        for view, lines, columns in self.cut:
            shown[view] = view + 1 + cells(self.grid, lines, columns).ravel()
        taps, weights = np.concatenate(self.taps), np.concatenate(self.weights)
        heaviest = tile[np.take_along_axis(taps, weights.argmax(axis=1)[:, None], axis=1)[:, 0]] if len(taps) else taps
        of_mixed = np.full(mixed + 1, -1)  # the last is the newline
        of_mixed[: len(heaviest)] = heaviest.ravel()
        return np.concatenate([tile, of_mixed]), np.concatenate([shown.ravel(), np.full(mixed + 1, -1)])

    def layout(self, buckets: Buckets) -> dict[str, np.ndarray]:
        """`Arranged.layout`: the patches and weights of all mixed embeddings, padded to a bucket."""
        rows = round_up(self.count, buckets.vision)
        tables = {"taps": self.taps, "weights": self.weights} if self.wiring.taps else {}
        return {name: padded(np.concatenate(table), rows) for name, table in tables.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaNextPictures(Pictures):
    """Converts images and videos to tiles and frames."""

    config: AnyResConfig
    settings: PixelSettings
    frame: PixelSettings | None  # None: no video, or no settings for videos

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """The image becomes the overview and, unless it is shown only as that, its tiles."""
        size, wiring, side = (image.height, image.width), self.config.wiring, self.config.vision.image_size
        if wiring.only_alone and images > 1:
            tiles = [to_square(image, dataclasses.replace(self.settings, square=True), side)]
        else:
            assert self.settings.whole is not None  # or there would be no tiles of the tower's size
            overview = image.resize(self.settings.whole[::-1], resample=self.settings.resample)
            parts = [overview, *self._parts(image, best_resolution(size, wiring.pinpoints), side)]
            tiles = [to_square(part, self.settings, side) for part in parts]
        arrays = {"pixel_values": np.stack(tiles), "image_sizes": np.array(size), "batch_num_images": np.array(images)}
        return Read(arrays=arrays, tokens=len(Views(self.config).picture(size, alone=images == 1)))

    def video(self, video: Video) -> Read:
        """Every frame of the video becomes one square."""
        if self.config.wiring.video is None:
            return super().video(video)
        if self.frame is None:
            raise InputError(NO_VIDEO)
        side = self.config.vision.image_size
        frames = [to_square(open_image(frame), self.frame, side) for frame in video.frames]
        tokens = len(Views(self.config).video(len(frames)))
        return Read(arrays={"pixel_values_videos": np.stack(frames)}, tokens=tokens)

    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        """Array name -> list, because images differ in their number of tiles. `batch_num_images` is per prompt."""
        batch: dict[str, Any] = by_name(reads)
        first, numbers = 0, batch.get("batch_num_images", [])
        while first < len(numbers):  # every image contains the number, so keep that of the prompt's first image
            del numbers[first + 1 : first + int(numbers[first])]
            first += 1
        return batch

    def _parts(self, image: PIL.Image.Image, target: tuple[int, int], side: int) -> list[PIL.Image.Image]:
        """The image resized, padded with black to `target`, and cut into tiles line by line."""
        height, width = fitted((image.height, image.width), target)
        check_area(width, height, f"the {image.width} x {image.height} image, after resizing")
        canvas = PIL.Image.new("RGB", (target[1], target[0]))
        corner = (target[1] - width) // 2, (target[0] - height) // 2
        canvas.paste(image.resize((width, height), resample=self.settings.resample), corner)
        return tiles_of(canvas, side)


def _sizes(batch: Batch) -> tuple[list[tuple[int, int]], list[bool]]:
    """Height and width of each image, and whether it is the only one of its prompt."""
    if batch.get("pixel_values") is None:
        return [], []
    if batch.get("image_sizes") is None:
        raise InputError("inputs have pixel_values but no image_sizes, the height and width of each image")
    sizes = [(int(height), int(width)) for height, width in np.asarray(batch["image_sizes"]).reshape(-1, 2)]
    if any(min(size) < 1 for size in sizes):
        raise InputError(f"image_sizes={sizes!r}: every image needs a height and a width of at least 1")
    numbers = batch.get("batch_num_images")
    numbers = [1] * len(sizes) if numbers is None else [int(n) for n in np.asarray(numbers).ravel()]
    if sum(numbers) != len(sizes):
        raise InputError(
            f"batch_num_images={numbers} adds up to {sum(numbers)}, but there are {len(sizes)} image_sizes"
        )
    return sizes, [n == 1 for n in numbers for _ in range(n)]


def _list(batch: Batch, name: str, count: int | None = None) -> Sequence[np.ndarray]:
    images = batch.get(name)
    arrays = [] if images is None else [np.asarray(image, np.float32) for image in images]
    if count is not None and len(arrays) != count:
        raise InputError(f"{name} has {len(arrays)} images, but image_sizes has {count}")
    return arrays
