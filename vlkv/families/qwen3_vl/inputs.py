"""Images of Qwen3-VL, as in Qwen2-VL. In a video, text with the time stands before each frame.

So each frame of a video has its own marks and positions like an image. `Inputs.from_hf` accepts videos from
transformers' processor, which writes the times; the processor of this library does not, and refuses videos.
"""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from vlkv.errors import InputError
from vlkv.families.qwen2_vl.inputs import Qwen2VlPictures
from vlkv.processing.pictures import Read, Video


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VlPictures(Qwen2VlPictures):
    """Converts images to patches."""

    @override
    def video(self, video: Video) -> Read:
        raise InputError("videos of Qwen3-VL, with a time before each frame, are not supported here yet: give its "
                         "frames as images, or use transformers' processor and vlkv.Inputs.from_hf")  # fmt: skip
