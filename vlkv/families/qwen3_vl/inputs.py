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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VlPictures(Qwen2VlPictures):
    """Converts images and videos to patches."""

    @override
    def video(self, video: Video) -> Read:
        frames, size = self._frames(video), self.config.frames
        if len(frames) < size:
            raise InputError(f"a video needs at least {size} frames: give a single frame as an image")
        read = self._read(frames, "video")
        count = int(read.arrays["video_grid_thw"][0])
        times = list(chain(video.seconds, repeat(video.seconds[-1], count * size - len(frames))))
        ends = zip(times[::size], times[size - 1 :: size], strict=True)
        text = "".join(self.frame(first, last, read.tokens // count) for first, last in ends)
        return dataclasses.replace(read, text=text)

    def frame(self, first: float, last: float, tokens: int) -> str:
        """The text of a frame of the tower.

        Args:
            first: time of its first picture, in seconds from the start of the video.
            last: time of its last picture.
            tokens: number of its vision tokens.
        """
        return f"<{(first + last) / 2:.1f} seconds><|vision_start|>{'<|video_pad|>' * tokens}<|vision_end|>"

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        if kind == "image":
            return super()._scaled(height, width, kind, frames)
        c = self.config
        return self.settings[kind].scaled_together(height, width, c.patch_size * c.merge, frames, c.frames)
