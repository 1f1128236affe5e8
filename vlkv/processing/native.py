"""Images at their native resolution, and videos, with positions on three axes.

The tower processes frames: an image is one frame, and every two pictures of a video are one frame. All tokens of a
frame are vision tokens, and each frame has its own grid, so a policy with windows treats the frames of a video as
separate images. The marks around an image are text.

The patches of a frame keep the checkpoint's order: the merge x merge patches of a token are neighbours. If the tower
has attention windows, the patches of a window are contiguous and padded to a whole window, so that a reshape separates
the windows.

An image is resized to whole tokens, between a least and a greatest number of pixels, and cut into patches. Frames of a
video are resized in the same way, with their own limits; the caller chooses the frames. All resizing is done by PIL;
transformers uses torchvision for videos.

Axes: B batch · T tokens · F frames of the batch · n patches of a frame with padding · C values of a patch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from einops import rearrange
from jaxtyping import Float, Int
from typing_extensions import override

from vlkv.buckets import Buckets, round_up
from vlkv.errors import InputError
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, arrange_entries, entries, zeros
from vlkv.processing.host import HostConfig
from vlkv.processing.images import check_area, open_image
from vlkv.processing.pictures import Pictures, Read, Video
from vlkv.processing.pixels import (
    NO_VIDEO,
    Kinds,
    Layout,
    PictureKind,
    ScaleSettings,
    find_settings,
    find_video_settings,
    to_pixels,
)

_FIELDS: dict[PictureKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_MOST_TOKENS = 1280  # tokens of one sample image


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image or a video; or one frame of a video, if text separates its frames."""

    patches: Float[np.ndarray, "frames patches C"]
    lines: int  # in tokens, like columns
    columns: int
    interval: float  # temporal positions from one frame to the next
    begin: int = 0  # number of the first of these frames in the video
    together: bool = True  # positions are those in the whole video; False: of a picture of its own

    def entries(self, slots: Int[np.ndarray, "frames lines columns"]) -> Int[np.ndarray, "V 9"]:
        """One row for each token of the picture; `slots` are the indices of their vision embeddings.

        Columns: the four of `entries`; the extent at the first token, else 0; the extent; three positions.
        The positions (time, line, column) are relative to the start of the picture. The extent is how far the
        picture moves the text after it. Times are computed in float32 and then truncated, as in transformers. If frames
        of the same video are already in the prompt, the positions are relative to the end of these, and so may be
        negative: together they are the positions of the whole video.
        """
        views = np.concatenate([entries(slot, frame) for frame, slot in enumerate(slots)])
        positions, earlier = views[:, 1:].copy(), self.begin if self.together else 0
        positions[:, 0] = self._time(positions[:, 0] + earlier)
        if earlier:
            positions -= max(int(self._time(np.array(earlier - 1))), self.lines - 1, self.columns - 1) + 1
        extent = np.full((len(positions), 1), positions.max() + 1)
        first = np.where(np.arange(len(positions)) == 0, extent[:, 0], 0)[:, None]
        return np.concatenate([views, first, extent, positions], axis=1)

    def _time(self, frame: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
        return (frame.astype(np.float32) * np.float32(self.interval)).astype(np.int64)


class NativeResolutionConfig(HostConfig):
    """Images at their native resolution, and videos."""

    frames_apart: ClassVar[bool] = False  # whether text separates the frames of a video in the prompt
    pictures: ClassVar[type[NativePictures]]
    processors: ClassVar[Kinds]  # the image and video processors that a folder may name -> their defaults
    kinds: ClassVar[Mapping[PictureKind, str]]  # the supported kinds of pictures -> the processor of a file without one
    whole_batch: ClassVar = {"pixels": ("images",), "place": ("images",)}

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> NativePictures:
        return self.pictures(settings=self.read_settings(folder, layout), config=self.vision)

    def read_settings(self, folder: Path, layout: Layout) -> dict[PictureKind, ScaleSettings]:
        """A folder's settings for those kinds of pictures that it has settings for."""
        self.check_layout(layout)
        find = {"image": find_settings, "video": find_video_settings}
        files = {kind: find[kind](folder, self.processors, default) for kind, default in self.kinds.items()}
        return {kind: ScaleSettings.of(file, kind, self.vision) for kind, file in files.items() if file is not None}

    @property
    def picture_tokens(self) -> dict[PictureKind, int | None]:
        """The id of the tokens of images, and of those of videos, in the prompts that `arrange` gets."""
        return {"image": self.image_token, "video": self.video_token}

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `ModelConfig.arrange`. `batch` has arrays of images, of videos, or of both.

        Images: `pixel_values` [patches, C], `image_grid_thw` [images, 3]. Videos: `pixel_values_videos`,
        `video_grid_thw` and perhaps `second_per_grid_ts` and `video_begin` [videos], how many frames of the same video
        the prompt has already. In the result, `layout["place"]` [F, n, 2] is the line and column of each patch, -1 for
        padding. The position of the text after a picture is the greatest position on all axes plus one (Qwen2-VL, Sec.
        2.1; transformers 4). transformers 5.23 ignores the temporal axis there, which differs for videos with more
        frames than lines and columns.
        """
        pictures = {kind: _pictures(batch, kind, self.vision) for kind in _FIELDS}
        if self.frames_apart:
            pictures["video"] = [
                dataclasses.replace(video, patches=frame[None], begin=video.begin + i, together=False)
                for video in pictures["video"]
                for i, frame in enumerate(video.patches)
            ]
        all_pictures = [picture for of_kind in pictures.values() for picture in of_kind]
        pixels, place, slots = pack(all_pictures, self.vision, buckets) if all_pictures else (None, None, ())
        rows = iter([picture.entries(slot) for picture, slot in zip(all_pictures, slots, strict=True)])
        by_token = {token: [next(rows) for _ in pictures[kind]] for kind, token in self.picture_tokens.items()}
        frames = {self.picture_tokens["video"]: [video.begin for video in pictures["video"]]}
        fields, extra = arrange_entries(tokens, valid, by_token, buckets, frames=frames)
        is_vision, extra = fields["vision_index"] >= 0, np.pad(extra, [(0, 0), (0, 0), (0, 5 - extra.shape[2])])
        # The position at which each token's picture starts; of text, its own position. A token of text moves what
        # follows by one, and a picture by its extent, which is counted at its first token.
        start = np.cumsum(np.where(is_vision, extra[..., 0], valid), axis=1) - np.where(is_vision, extra[..., 1], 1)
        fields["positions"] = np.where(valid[..., None], start[..., None] + extra[..., 2:], 0).astype(np.int32)
        return Arranged(**fields, pixels=pixels, layout={} if place is None else {"place": place})

    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        """Like `ModelConfig.sample`: square images with `max_tokens` tokens together, and at most 1280 tokens each."""
        c, side = self.vision, math.isqrt(max(1, min(max_tokens // pictures, _MOST_TOKENS)))
        lines = side * c.merge
        arrays = {"pixel_values": zeros(pictures * lines**2, *c.patch_shape),
                  "image_grid_thw": np.array([[1, lines, lines]] * pictures)}  # fmt: skip
        return arrays, pictures * side**2

    def max_pictures(self, max_tokens: int) -> int:
        """The smallest number of images that can have `max_tokens` vision tokens together.

        Images may be tiny, so the greatest number would not be useful.
        """
        return max(1, math.ceil(max_tokens / _MOST_TOKENS))


def _pictures(batch: Batch, kind: PictureKind, c: Any) -> list[Picture]:
    name, grid_name = _FIELDS[kind]
    pixels = batch.get(name)
    if pixels is None:
        return []
    if batch.get(grid_name) is None:
        raise InputError(f"inputs have {name} but no {grid_name}")
    pixels, grids = np.asarray(pixels, np.float32), np.asarray(batch[grid_name])
    if grids.ndim != 2 or grids.shape[1] != 3 or (grids < 1).any() or (grids[:, 1:] % c.merge).any():
        raise InputError(f"{grid_name} must be [{kind}s, 3]: frames, lines and columns; lines and columns must be "
                         f"multiples of {c.merge}")  # fmt: skip
    expected = (int(grids.prod(axis=1).sum()), *c.patch_shape)
    if pixels.shape != expected:
        raise InputError(f"{name} have shape {pixels.shape}, expected {list(expected)} from {grid_name}")
    times = None if kind == "image" else batch.get("second_per_grid_ts")
    seconds = np.ones(len(grids)) if times is None else np.asarray(times, np.float64)
    begins = None if kind == "image" else batch.get("video_begin")
    begins = np.zeros(len(grids), int) if begins is None else np.asarray(begins)
    for name, array in (("second_per_grid_ts", seconds), ("video_begin", begins)):
        if array.shape != (len(grids),):
            raise InputError(f"{name} has shape {array.shape}, but {grid_name} has {grids.shape}")
    if c.whole_seconds:
        seconds = np.trunc(seconds)
    intervals = np.ones(len(grids)) if c.tokens_per_second is None else c.tokens_per_second * seconds
    ends = np.cumsum(grids.prod(axis=1))
    pictures = []
    for part, (t, h, w), interval, begin in zip(np.split(pixels, ends[:-1]), grids, intervals, begins, strict=True):
        patches = part.reshape(int(t), -1, c.patch_values)
        if c.by_line:  # make the patches of a token neighbours, as in other checkpoints
            patches = rearrange(patches, "t (y a x b) c -> t (y x a b) c", y=h // c.merge, a=c.merge, b=c.merge)
        pictures.append(Picture(patches, int(h) // c.merge, int(w) // c.merge, float(interval), int(begin)))
    return pictures


def pack(
    pictures: list[Picture], c: Any, buckets: Buckets
) -> tuple[Float[np.ndarray, "F n C"], Int[np.ndarray, "F n 2"], list[Int[np.ndarray, "frames lines columns"]]]:
    """Pixels, and line and column of each patch, both padded; and the index of each token's vision embedding."""
    unit = c.merge**2
    slots = [_slots(p.lines, p.columns, c.window) for p in pictures]
    window = unit * (c.window or 1) ** 2  # windows at the border of a picture are padded to a whole window
    # Rounded up to whole windows, before and after rounding to a bucket.
    n = -(-max(int(s.max()) + 1 for s in slots) * unit // window) * window
    n = -(-round_up(n, buckets.patches) // window) * window
    frames = round_up(sum(len(p.patches) for p in pictures), buckets.images)
    pixels, place = np.zeros((frames, n, c.patch_values), np.float32), np.full((frames, n, 2), -1, np.int32)
    within = np.indices((c.merge, c.merge)).reshape(2, -1).T  # [unit, 2]
    first, index = 0, []  # first frame of the next picture
    for picture, slot in zip(pictures, slots, strict=True):
        patch = (slot.reshape(-1, 1) * unit + np.arange(unit)).ravel()
        token = np.indices((picture.lines, picture.columns)).reshape(2, -1).T
        frame = np.arange(first, first + len(picture.patches))
        pixels[frame[:, None], patch] = picture.patches
        place[frame[:, None], patch] = (token[:, None] * c.merge + within).reshape(-1, 2)
        index.append(slot + frame[:, None, None] * (n // unit))
        first += len(frame)
    return pixels, place, index


def _slots(lines: int, columns: int, window: int | None) -> Int[np.ndarray, "lines columns"]:
    """The index of each token in its frame: in raster order, or window by window."""
    line, column = np.indices((lines, columns))
    if window is None:
        return line * columns + column
    across = -(-columns // window)
    return ((line // window * across + column // window) * window + line % window) * window + column % window


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativePictures(Pictures):
    """Converts images and videos to patches."""

    settings: Mapping[PictureKind, ScaleSettings]
    config: Any  # a `NativeConfig`

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """The image becomes the patches of one frame."""
        return self._read([image], "image")

    def video(self, video: Video) -> Read:
        """The video becomes patches and the number of seconds between two frames of the tower."""
        seconds = np.array(self.config.frames / video.fps)
        return self._read_video(video, second_per_grid_ts=seconds)

    def _read_video(self, video: Video, **further: np.ndarray) -> Read:
        size, begin = self.config.frames, video.begin or 0
        if begin % size:
            raise InputError(f"the model takes {size} frames together: watch groups of a multiple of {size} frames")
        further |= {} if video.begin is None else {"video_begin": np.array(begin // size)}
        return self._read(self._frames(video), "video", **further)

    def _frames(self, video: Video) -> list[PIL.Image.Image]:
        if "video" not in self.settings:
            raise InputError(NO_VIDEO)
        frames = [open_image(frame) for frame in video.frames]
        if len({frame.size for frame in frames}) > 1:
            raise InputError("the frames of a video differ in size; resize them to one size")
        return frames

    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        """Height and width in pixels of an image, or of each of `frames` frames, after resizing.

        Here the limits of pixels apply to each frame by itself.
        """
        return self.settings[kind].scaled(height, width, self.config.patch_size * self.config.merge)

    def _read(self, frames: Sequence[PIL.Image.Image], kind: PictureKind, **further: np.ndarray) -> Read:
        """The patches of all frames, their number along time, lines and columns, and the arrays in `further`."""
        c, settings = self.config, self.settings[kind]
        height, width = self._scaled(frames[0].height, frames[0].width, kind, len(frames))
        check_area(width, height, f"the {frames[0].width} x {frames[0].height} image, after resizing")
        resized = [frame.resize((width, height), resample=settings.pixels.resample) for frame in frames]
        pixels = [to_pixels(frame, settings.pixels) for frame in resized]
        pixels += pixels[-1:] * (-len(pixels) % c.frames)  # a single image, or the last frame, is repeated
        merge = 1 if c.by_line else c.merge
        patches = rearrange(
            np.stack(pixels), "(t f) c (y a p) (x b q) -> (t y x a b) (c f p q)",
            f=c.frames, a=merge, b=merge, p=c.patch_size, q=c.patch_size,
        ).reshape(-1, *c.patch_shape)  # fmt: skip
        grid = np.array([len(pixels) // c.frames, height // c.patch_size, width // c.patch_size])
        arrays = dict(zip(_FIELDS[kind], (patches, grid), strict=True))
        return Read(arrays={**arrays, **further}, tokens=int(grid.prod()) // c.merge**2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedPictures(NativePictures):
    """Writes the time of each frame of a video into the prompt. Each frame has its own marks and positions.

    The limits of pixels apply to all pictures of a video together.
    """

    @override
    def video(self, video: Video) -> Read:
        size = self.config.frames
        if len(video.frames) < size and video.begin is None:
            raise InputError(f"a video needs at least {size} frames: give a single frame as an image")
        read = self._read_video(video)
        count = int(read.arrays["video_grid_thw"][0])
        times = list(chain(video.seconds, repeat(video.seconds[-1], count * size - len(video.frames))))
        ends = zip(times[::size], times[size - 1 :: size], strict=True)
        text = "".join(self.frame(first, last, read.tokens // count) for first, last in ends)
        return dataclasses.replace(read, text=text)

    def frame(self, first: float, last: float, tokens: int) -> str:
        """The text of a frame of the tower, with its image tokens.

        `first` and `last`: seconds of its first and its last picture; `tokens`: number of its vision tokens.
        """
        raise NotImplementedError

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        if kind == "image":
            return super()._scaled(height, width, kind, frames)
        c = self.config
        return self.settings[kind].scaled_together(height, width, c.patch_size * c.merge, frames, c.frames)
