"""Images of PaddleOCR-VL, as in Qwen2-VL: resized to whole tokens, and every token of an image is a vision token.

The marks around an image (<|IMAGE_START|>, <|IMAGE_END|>) are text. A side that is shorter than a token is first
stretched to one. The processor returns patches line by line, and not token by token. Videos are not supported, as in
transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from typing_extensions import override

from vlkv.families.qwen2_vl.inputs import NativeResolutionConfig, Qwen2VlPictures
from vlkv.processing.pictures import Pictures, Read, Video
from vlkv.processing.pixels import Kinds, PictureKind

_DEFAULTS = dict(patch_size=14, temporal_patch_size=1, merge_size=2, pixel_limits=True,
                 size={"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536})  # fmt: skip


class ImagesConfig(NativeResolutionConfig):
    """Images at their native resolution, without videos."""

    # The second name is that of the authors' code.
    processors: ClassVar[Kinds] = dict.fromkeys(("PaddleOCRVLImageProcessor", "SiglipImageProcessor"), _DEFAULTS)
    kinds: ClassVar[Mapping[PictureKind, str]] = {"image": "PaddleOCRVLImageProcessor"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddleOcrVlPictures(Qwen2VlPictures):
    """Converts images to patches."""

    @override
    def video(self, video: Video) -> Read:
        return Pictures.video(self, video)

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        factor = self.config.patch_size * self.config.merge
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return super()._scaled(height, width, kind, frames)
