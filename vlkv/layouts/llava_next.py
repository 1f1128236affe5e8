"""LLaVA-NeXT, OneVision and Video: pictures seen whole and in tiles, and the frames of videos.

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
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import AnyRes, ClipConfig, ModelConfig, SiglipConfig
from vlkv.errors import InputError
from vlkv.layouts.anyres import best_resolution, bilinear, means, without_padding
from vlkv.layouts.arranged import Arranged, count_up

# Where an embedding comes from, as long as the number of patches is not known: a patch's own number, a negative one
# for the newline, and below it the mixed ones.
_NEWLINE, _MIXED = -1, -2


@dataclasses.dataclass(frozen=True)
class View:
    """Patches in lines and columns, and where newlines stand."""

    field: Int[np.ndarray, "lines columns"]
    newline: Literal["line", "end", "none"] = "none"

    def entries(self, number: int) -> Int[np.ndarray, "n 4"]:
        """What stands in the prompt, in order: source, number of the view, line, column."""
        lines = len(self.field)
        places = np.stack([self.field, np.full(self.field.shape, number), *np.indices(self.field.shape)], axis=-1)
        end = np.array([_NEWLINE, number, -1, -1])
        if self.newline == "line":
            places = np.concatenate([places, np.broadcast_to(end, (lines, 1, 4))], axis=1)
        places = places.reshape(-1, 4)
        return np.concatenate([places, end[None]]) if self.newline == "end" else places


class Pictures:
    """Numbers patches and mixed embeddings of one batch, picture after picture."""

    def __init__(self, config: ModelConfig) -> None:
        assert isinstance(config.vision, ClipConfig | SiglipConfig)
        self.wiring: AnyRes = config.wiring
        self.side, self.grid = config.vision.image_size, config.vision.grid
        self.tiles = 0
        self.mixed: list[tuple[np.ndarray, np.ndarray]] = []  # [m, taps] each
        self.count = 0  # of the mixed ones

    def picture(self, size: tuple[int, int], *, alone: bool = True) -> Int[np.ndarray, "n 4"]:
        """The prompt's entries for one picture.

        Args:
            size: height and width in pixels.
            alone: whether it is the only picture of its prompt.
        """
        whole = self._tiles(1, 1)
        if self.wiring.only_alone and not alone:
            return View(whole, "end").entries(0)
        height, width = best_resolution(size, self.wiring.pinpoints)
        parts = self._tiles(height // self.side, width // self.side)
        parts = without_padding(parts, size, rounded=self.wiring.rounded)
        if self.wiring.most_tiles is not None:
            ratio = float(np.sqrt(parts.size / (self.wiring.most_tiles * self.grid**2)))
            if ratio > 1.1:
                parts = self._mix(*bilinear(parts, (int(parts.shape[0] // ratio), int(parts.shape[1] // ratio))))
        return np.concatenate([View(whole).entries(0), View(parts, "line").entries(1)])

    def video(self, frames: int) -> Int[np.ndarray, "n 4"]:
        """The prompt's entries for one video."""
        pooling = self.wiring.video
        assert pooling is not None
        made = []
        for frame in range(frames):
            field = self._tiles(1, 1)
            if pooling.mode == "bilinear":
                side = -(-self.grid // pooling.stride)
                field = self._mix(*bilinear(field, (side, side)))
            else:
                field = self._mix(*means(field, pooling.stride))
            ends = pooling.newline == "frame" or (pooling.newline == "video" and frame == frames - 1)
            made.append(View(field, "line" if pooling.newline == "line" else "end" if ends else "none").entries(frame))
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
        shape, more = taps.shape[:2], self.wiring.taps - taps.shape[2]
        flat = taps.reshape(-1, taps.shape[2]), weights.reshape(-1, taps.shape[2])
        self.mixed.append((np.pad(flat[0], [(0, 0), (0, more)]), np.pad(flat[1], [(0, 0), (0, more)])))
        first, self.count = self.count, self.count + len(flat[0])
        return _MIXED - np.arange(first, self.count).reshape(shape)

    def layout(self, buckets: Buckets) -> dict[str, np.ndarray]:
        """`taps` and `weights`, padded to a bucket."""
        if not self.wiring.taps:
            return {}
        taps = np.zeros((round_up(self.count, buckets.vision), self.wiring.taps), np.int32)
        weights = np.zeros(taps.shape, np.float32)
        if self.mixed:
            taps[: self.count] = np.concatenate([made[0] for made in self.mixed])
            weights[: self.count] = np.concatenate([made[1] for made in self.mixed])
        return {"taps": taps, "weights": weights}


def picture_tokens(config: ModelConfig, size: tuple[int, int], *, alone: bool = True) -> int:
    """Vision tokens of a picture of so many pixels, newlines among them."""
    return len(Pictures(config).picture(size, alone=alone))


def video_tokens(config: ModelConfig, frames: int) -> int:
    """Vision tokens of a video, newlines among them."""
    return len(Pictures(config).video(frames))


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """From `pixel_values` [I, tiles, 3, h, w] and `image_sizes` [I, 2], `pixel_values_videos` [I, frames, 3, h, w].

    Pictures of different numbers of tiles may be padded with any tiles, or come as a list. `batch_num_images` says how
    many pictures the prompts with pictures have, where the family asks (None: one each).

    Raises:
        InputError: image tokens and pixels that do not match.
    """
    pictures, pixels = Pictures(config), []
    images, videos = [], []
    sizes, alone = _sizes(batch)
    for given, size, one in zip(_list(batch, "pixel_values", len(sizes)), sizes, alone, strict=True):
        before = pictures.tiles
        images.append(pictures.picture(size, alone=one))
        pixels.append(_tiles("pixel_values", given, pictures.tiles - before, config, f"an image of {size} pixels"))
    for given in _list(batch, "pixel_values_videos"):
        if config.wiring.video is None:
            raise InputError(f"{config.family} takes no video: give its frames as pixel_values")
        videos.append(pictures.video(len(given)))
        pixels.append(_tiles("pixel_values_videos", given, len(given), config, "a video"))
    if images and videos and config.image_token == config.video_token:
        raise InputError(f"{config.family} has one token for images and videos: give a batch of one kind")
    made = {token: some for token, some in ((config.image_token, images), (config.video_token, videos)) if some}
    entry, views, is_vision = _place(tokens, valid, config, made)
    layout = pictures.layout(buckets)
    all_tiles = round_up(pictures.tiles, buckets.images)
    mixed = all_tiles * pictures.grid**2
    newline = mixed + (len(layout["taps"]) if layout else 0)
    source = entry[..., 0]
    source = np.where(source >= 0, source, np.where(source == _NEWLINE, newline, mixed + _MIXED - source))
    stacked = None
    if pixels:
        stacked = np.concatenate(pixels)
        stacked = np.pad(stacked, [(0, all_tiles - len(stacked)), (0, 0), (0, 0), (0, 0)])
    return Arranged(
        vision_index=np.where(is_vision, source, -1).astype(np.int32),
        grid=np.where(is_vision[..., None], entry[..., 1:], -1).astype(np.int32),
        positions=count_up(valid),
        pixels=stacked,
        layout=layout if pixels else {},
        max_vision=round_up(int(is_vision.sum(axis=1).max()), buckets.vision),
        max_images=round_up(views, buckets.images),
    )


def _place(
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    made: Mapping[int | None, Sequence[np.ndarray]],
) -> tuple[Int[np.ndarray, "B T 4"], int, Bool[np.ndarray, "B T"]]:
    """Every entry at its place; the most views of a row; which tokens are vision."""
    is_vision = valid & np.isin(
        tokens, [token for token in (config.image_token, config.video_token) if token is not None]
    )
    left = {token: iter(some) for token, some in made.items()}
    wanted, given = int(is_vision.sum()), sum(len(one) for some in made.values() for one in some)
    if wanted != given:
        raise InputError(f"the prompt holds {wanted} image and video tokens, but the pictures need {given}: "
                         "give one mark per picture")  # fmt: skip
    entry, most = np.zeros((*tokens.shape, 4), np.int64), 0
    for row in range(len(tokens)):
        places, views, at = np.flatnonzero(is_vision[row]), 0, 0
        while at < len(places):
            token = int(tokens[row, places[at]])
            one = next(left.get(token, iter(())), None)
            span = places[at : at + (0 if one is None else len(one))]
            if one is None or len(span) < len(one) or (tokens[row, span] != token).any():
                raise InputError(f"row {row} of the prompt: its image tokens do not end where its pictures do; "
                                 "repeat each picture's token once per vision token")  # fmt: skip
            entry[row, span] = one + np.array([0, views, 0, 0])
            views += int(one[:, 1].max()) + 1
            at += len(one)
        most = max(most, views)
    return entry, most, is_vision


def _sizes(batch: Mapping[str, Any]) -> tuple[list[tuple[int, int]], list[bool]]:
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


def _list(batch: Mapping[str, Any], name: str, count: int | None = None) -> Sequence[np.ndarray]:
    given = batch.get(name)
    made = [] if given is None else [np.asarray(one, np.float32) for one in given]
    if count is not None and len(made) != count:
        raise InputError(f"{name} has {len(made)} pictures, image_sizes {count}")
    return made


def _tiles(name: str, given: np.ndarray, count: int, config: ModelConfig, what: str) -> np.ndarray:
    assert isinstance(config.vision, ClipConfig | SiglipConfig)
    side = config.vision.image_size
    if given.ndim != 4 or given.shape[1:] != (3, side, side) or len(given) < count or not count:
        raise InputError(f"{name}: {what} has shape {given.shape}, expected [{count}, 3, {side}, {side}]")
    return given[:count]
