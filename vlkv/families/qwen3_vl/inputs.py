"""Images of Qwen3-VL, as in Qwen2-VL. In a video, text with the time stands before each frame of the tower.

So each such frame, of two pictures, has its own marks and positions like an image. Its time is the mean of the two. The
limits of pixels apply to all pictures of a video together. A processor of transformers before 5.10 leaves out the two
marks around the whole video.
"""

from __future__ import annotations

import dataclasses
from itertools import chain, repeat

from typing_extensions import override

from vlkv.errors import InputError
from vlkv.families.qwen2_vl.inputs import Qwen2VlPictures
from vlkv.processing.pictures import Read, Video
from vlkv.processing.pixels import PictureKind

_FRAME = "<{seconds:.1f} seconds><|vision_start|>{tokens}<|vision_end|>"
_TOKEN = "<|video_pad|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VlPictures(Qwen2VlPictures):
    """Converts images and videos to patches."""

    @override
    def video(self, video: Video) -> Read:
        frames, size = self._frames(video), self.config.frames
        if len(frames) < size:
            raise InputError(f"a video of Qwen3-VL needs at least {size} frames: give a single frame as an image")
        read = self._read(frames, "video")
        count = int(read.arrays["video_grid_thw"][0])
        times = [i / video.fps for i in range(len(frames))]
        times = list(chain(times, repeat(times[-1], count * size - len(times))))
        ends = zip(times[::size], times[size - 1 :: size], strict=True)
        tokens = _TOKEN * (read.tokens // count)
        text = "".join(_FRAME.format(seconds=(first + last) / 2, tokens=tokens) for first, last in ends)
        return dataclasses.replace(read, text=text)

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        if kind == "image":
            return super()._scaled(height, width, kind, frames)
        size, factor = self.config.frames, self.config.patch_size * self.config.merge
        if min(height, width) < factor:
            grow = max(factor / height, factor / width)
            height, width = int(height * grow), int(width * grow)
        return self.settings[kind].scaled(height, width, factor, frames, round(frames / size) * size)
