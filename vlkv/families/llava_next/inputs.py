"""Pictures of LLaVA-NeXT, OneVision and Video: seen whole and, larger, in tiles; and the frames of videos.

A picture is first one tile, the view of the whole, then many: stitched together again, line after line, without the
patches that only show padding, a newline embedding after every line. Each of the two is an image of its own in `grid`,
and so is every frame of a video. Lines and columns run over the stitched picture, not over a tile, as the prompt holds
it after unpadding and resizing: so LightKV's windows join what is close in the picture. Newlines are vision tokens,
because they stand under the image token in the prompt, but lie on no grid: they have the number of their view, and -1
for line and column.

The batch's flat vision embeddings are, in this order: the patches of all tiles and frames in raster order, the mixed
embeddings, the newline. A mixed one is a weighted sum of patches: `layout["taps"]` [M, taps] says which,
`layout["weights"]` [M, taps] how much. M is a bucket, and both are missing for a family that mixes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from jaxtyping import Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.errors import InputError
from vlkv.families.llava.inputs import LLAVA_KINDS
from vlkv.families.llava_next.anyres import best_resolution, bilinear, fitted, means, without_padding
from vlkv.processing.arranging import (
    OTHERS,
    PICTURE,
    Arranged,
    Batch,
    Mask,
    TextInputs,
    Tokens,
    arrange_entries,
    cells,
    entries,
    padded,
    parts_of,
    zeros,
)
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video, by_name, tiles_of, to_square
from vlkv.processing.pixels import Layout, PixelSettings, find_settings


class LlavaNextInputs(TextInputs):
    """Pictures of any shape, and videos where the family takes them."""

    whole_batch: ClassVar = {"pixels": ("images",), "taps": ("vision",), "weights": ("vision",)}

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        """The settings of the folder, which must be those of config.json."""
        self.only_checkpoint(layout)
        # Original checkpoints do not say what becomes of pixels: what the tower was trained on.
        size = {"height": self.vision.image_size, "width": self.vision.image_size}
        default = None if self.vision.class_token else {"image_processor_type": "SiglipImageProcessor", "size": size}
        raw, source = find_settings(folder, default=default)
        points = raw.get("image_grid_pinpoints")
        if points is not None and tuple(map(tuple, points)) != self.wiring.pinpoints:
            raise InputError(f"{source}: image_grid_pinpoints are not those of config.json: "
                             "the files are not of one checkpoint")  # fmt: skip
        image, frame = PixelSettings.from_hf(raw, source, kinds=LLAVA_KINDS), None
        if self.wiring.video is not None:
            frame = PixelSettings.from_hf(*find_settings(folder, "video", default), kinds=LLAVA_KINDS)
        return LlavaNextPictures(config=self, settings=image, frame=frame)

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """From `pixel_values` [I, tiles, 3, h, w], `image_sizes` [I, 2], `pixel_values_videos` [I, frames, 3, h, w].

        Pictures of different numbers of tiles may be padded with any tiles, or come as a list. `batch_num_images` says
        how many pictures the prompts with pictures have, where the family asks (None: one each).
        """
        views, pixels = Views(self), []
        made: dict[int | None, list[np.ndarray]] = {self.image_token: [], self.video_token: []}
        sizes, alone = _sizes(batch)
        for given, size, one in zip(_list(batch, "pixel_values", len(sizes)), sizes, alone, strict=True):
            before = views.tiles
            made[self.image_token].append(views.picture(size, alone=one))
            pixels.append(self._tiles("pixel_values", given, views.tiles - before, f"an image of {size} pixels"))
        videos = _list(batch, "pixel_values_videos")
        if videos and self.wiring.video is None:
            raise InputError(f"{self.family} takes no video: give its frames as pixel_values")
        if videos and sizes and self.image_token == self.video_token:
            raise InputError(f"{self.family} has one token for images and videos: give a batch of one kind")
        for given in videos:
            made[self.video_token].append(views.video(len(given)))
            pixels.append(self._tiles("pixel_values_videos", given, len(given), "a video"))
        layout, tiles = views.layout(buckets), round_up(views.tiles, buckets.images)
        mixed = tiles * self.vision.grid**2
        fields, _ = arrange_entries(
            tokens, valid, made, buckets, others=mixed, newline=mixed + len(layout.get("taps", ()))
        )
        if pixels:
            parts = parts_of(fields["vision_index"], *views.tables(tiles, len(layout.get("taps", ()))))
            fields |= {"pixels": padded(np.concatenate(pixels), tiles), "layout": layout, "parts": parts}
        return Arranged(**fields)

    def sample(self, pictures: int, room: int) -> tuple[dict[str, Any], int]:
        """Pictures of 640 x 480 that are cut into tiles; several in one prompt may be shown whole only."""
        del room
        views, side = Views(self), self.vision.image_size
        each = len(views.picture(PICTURE, alone=pictures == 1))
        return {"pixel_values": [zeros(views.tiles, 3, side, side)] * pictures, "image_sizes": [PICTURE] * pictures,
                "batch_num_images": [pictures]}, pictures * each  # fmt: skip

    def _tiles(self, name: str, given: np.ndarray, count: int, what: str) -> np.ndarray:
        side = self.vision.image_size
        if given.ndim != 4 or given.shape[1:] != (3, side, side) or len(given) < count or not count:
            raise InputError(f"{name}: {what} has shape {given.shape}, expected [{count}, 3, {side}, {side}]")
        return given[:count]


class Views:
    """Numbers patches and mixed embeddings of one batch, picture after picture."""

    def __init__(self, config: LlavaNextInputs) -> None:
        self.wiring = config.wiring
        self.side, self.grid = config.vision.image_size, config.vision.grid
        self.tiles = 0
        self.cut: list[tuple[int, int, int]] = []  # a view of a whole picture, and lines and columns of its tiles
        self.count = 0  # of the mixed embeddings
        self.taps = [np.zeros((0, self.wiring.taps), np.int32)]  # [m, taps] each, as are the weights
        self.weights = [np.zeros((0, self.wiring.taps), np.float32)]

    def picture(self, size: tuple[int, int], *, alone: bool = True) -> Int[np.ndarray, "n 4"]:
        """The prompt's entries for one picture.

        Args:
            size: height and width in pixels.
            alone: whether it is the only picture of its prompt.
        """
        whole = self._tiles(1, 1)
        if self.wiring.only_alone and not alone:
            return entries(whole, 0, "end")
        height, width = best_resolution(size, self.wiring.pinpoints)
        self.cut.append((self.tiles - 1, height // self.side, width // self.side))
        parts = self._tiles(height // self.side, width // self.side)
        parts = without_padding(parts, size, rounded=self.wiring.rounded)
        if self.wiring.most_tiles is not None:
            ratio = float(np.sqrt(parts.size / (self.wiring.most_tiles * self.grid**2)))
            if ratio > 1.1:
                parts = self._mix(*bilinear(parts, (int(parts.shape[0] // ratio), int(parts.shape[1] // ratio))))
        return np.concatenate([entries(whole, 0), entries(parts, 1, "line")])

    def video(self, frames: int) -> Int[np.ndarray, "n 4"]:
        """The prompt's entries for one video."""
        pooling, made = self.wiring.video, []
        for frame in range(frames):
            field = self._tiles(1, 1)
            if pooling.mode == "bilinear":
                side = -(-self.grid // pooling.stride)
                field = self._mix(*bilinear(field, (side, side)))
            else:
                field = self._mix(*means(field, pooling.stride))
            ends = pooling.newline == "frame" or (pooling.newline == "video" and frame == frames - 1)
            made.append(entries(field, frame, "line" if pooling.newline == "line" else "end" if ends else "none"))
        return np.concatenate(made)

    def _tiles(self, rows: int, columns: int) -> Int[np.ndarray, "lines columns"]:
        """The next tiles, stitched together."""
        side, first = self.grid, self.tiles
        self.tiles += rows * columns
        patches = np.arange(first * side**2, self.tiles * side**2).reshape(rows, columns, side, side)
        return patches.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)

    def _mix(
        self, taps: Int[np.ndarray, "lines columns k"], weights: Float[np.ndarray, "lines columns k"]
    ) -> Int[np.ndarray, "lines columns"]:
        *shape, k = taps.shape
        for made, given in ((self.taps, taps), (self.weights, weights)):
            flat = np.zeros((shape[0] * shape[1], self.wiring.taps), made[0].dtype)
            flat[:, :k] = given.reshape(-1, k)
            made.append(flat)
        first, self.count = self.count, self.count + shape[0] * shape[1]
        return OTHERS - np.arange(first, self.count).reshape(shape)

    def tables(self, tiles: int, mixed: int) -> tuple[Int[np.ndarray, " R"], Int[np.ndarray, " R"]]:
        """What `parts_of` asks for; a mixed embedding is in the tile of the patch that counts most.

        Args:
            tiles: of the batch, padded.
            mixed: embeddings, padded.
        """
        tile = np.repeat(np.arange(tiles), self.grid**2)
        shown = np.full((tiles, self.grid**2), -1)
        for view, lines, columns in self.cut:
            shown[view] = view + 1 + cells(self.grid, lines, columns).ravel()
        taps, weights = np.concatenate(self.taps), np.concatenate(self.weights)
        most = tile[np.take_along_axis(taps, weights.argmax(axis=1)[:, None], axis=1)[:, 0]] if len(taps) else taps
        rest = np.full(mixed + 1, -1)  # the last is the newline
        rest[: len(most)] = most.ravel()
        return np.concatenate([tile, rest]), np.concatenate([shown.ravel(), np.full(mixed + 1, -1)])

    def layout(self, buckets: Buckets) -> dict[str, np.ndarray]:
        """`taps` and `weights`, padded to a bucket."""
        rows = round_up(self.count, buckets.vision)
        made = {"taps": self.taps, "weights": self.weights} if self.wiring.taps else {}
        return {name: padded(np.concatenate(some), rows) for name, some in made.items()}


def picture_tokens(config: LlavaNextInputs, size: tuple[int, int], *, alone: bool = True) -> int:
    """Vision tokens of a picture of so many pixels, newlines among them."""
    return len(Views(config).picture(size, alone=alone))


def video_tokens(config: LlavaNextInputs, frames: int) -> int:
    """Vision tokens of a video, newlines among them."""
    return len(Views(config).video(frames))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaNextPictures(Pictures):
    """Reads pictures and videos as the folder's settings say."""

    config: LlavaNextInputs
    settings: PixelSettings
    frame: PixelSettings | None  # None: no video

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """Its tiles: the whole, then its parts."""
        size, wiring, side = (image.height, image.width), self.config.wiring, self.config.vision.image_size
        if wiring.only_alone and images > 1:
            tiles = [to_square(image, dataclasses.replace(self.settings, square=True), side)]
        else:
            whole = image.resize((side, side), resample=self.settings.resample)
            parts = [whole, *self._parts(image, best_resolution(size, wiring.pinpoints), side)]
            tiles = [to_square(part, self.settings, side) for part in parts]
        arrays = {"pixel_values": np.stack(tiles), "image_sizes": np.array(size), "batch_num_images": np.array(images)}
        return Read(arrays=arrays, tokens=picture_tokens(self.config, size, alone=images == 1))

    def video(self, video: Video) -> Read:
        """Its frames."""
        if self.frame is None:
            return super().video(video)
        side = self.config.vision.image_size
        frames = [to_square(open_image(frame), self.frame, side) for frame in video.frames]
        return Read(arrays={"pixel_values_videos": np.stack(frames)}, tokens=video_tokens(self.config, len(frames)))

    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        """Lists, because pictures have different numbers of tiles; `batch_num_images` once for each prompt."""
        made: dict[str, Any] = by_name(reads)
        at, numbers = 0, made.get("batch_num_images", [])
        while at < len(numbers):  # each of the prompt's images says the same
            del numbers[at + 1 : at + int(numbers[at])]
            at += 1
        return made

    def _parts(self, image: PIL.Image.Image, target: tuple[int, int], side: int) -> list[PIL.Image.Image]:
        """The picture resized, on black, in tiles, row by row."""
        height, width = fitted((image.height, image.width), target)
        check_area(width, height, f"the {image.width} x {image.height} image, once resized")
        canvas = PIL.Image.new("RGB", (target[1], target[0]))
        corner = (target[1] - width) // 2, (target[0] - height) // 2
        canvas.paste(image.resize((width, height), resample=self.settings.resample), corner)
        return tiles_of(canvas, side)


def _sizes(batch: Batch) -> tuple[list[tuple[int, int]], list[bool]]:
    """Height and width of each picture, and whether it is the only one of its prompt."""
    if batch.get("pixel_values") is None:
        return [], []
    if batch.get("image_sizes") is None:
        raise InputError("pixel_values come without image_sizes, the height and width of each picture")
    sizes = [(int(height), int(width)) for height, width in np.asarray(batch["image_sizes"]).reshape(-1, 2)]
    if any(min(size) < 1 for size in sizes):
        raise InputError(f"image_sizes={sizes!r}: every picture needs a height and a width of at least 1")
    numbers = batch.get("batch_num_images")
    numbers = [1] * len(sizes) if numbers is None else [int(n) for n in np.asarray(numbers).ravel()]
    if sum(numbers) != len(sizes):
        raise InputError(
            f"batch_num_images={numbers} adds up to {sum(numbers)}, but there are {len(sizes)} image_sizes"
        )
    return sizes, [n == 1 for n in numbers for _ in range(n)]


def _list(batch: Batch, name: str, count: int | None = None) -> Sequence[np.ndarray]:
    given = batch.get(name)
    made = [] if given is None else [np.asarray(one, np.float32) for one in given]
    if count is not None and len(made) != count:
        raise InputError(f"{name} has {len(made)} pictures, image_sizes {count}")
    return made
