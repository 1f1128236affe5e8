"""Images of any size and videos of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, with positions on three axes.

Images become patches as in Qwen2-VL. All tokens of an image, <|image|>, are vision tokens; the marks around it
(<|begin_of_image|>, <|end_of_image|>) are text. A video is a list of frames of the tower, each made of two pictures,
with marks like an image and then its time as text: the time of the first picture, in whole seconds or with one digit
after the point. Each frame has positions and a grid like an image, so policies treat it as one. The tokens of frames
are <|image|> too; a pair of marks around the whole video, which are text, tells them from images.

The limits of pixels apply to both pictures of a patch, so an image may have half as many, and to all pictures of a
video together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.errors import InputError
from vlkv.families.qwen2_vl.inputs import NativeResolutionConfig
from vlkv.families.qwen3_vl.inputs import Qwen3VlPictures
from vlkv.files import read_json
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens
from vlkv.processing.pictures import Pictures
from vlkv.processing.pixels import Kinds, Layout, PictureKind

_FRAME = -1  # replaces the image token in videos
# Processors in transformers -> whether they write the time of a frame in whole seconds.
_WHOLE_SECONDS = {"Glm4vProcessor": True, "Glm46VProcessor": False}
# Class defaults of image and video processors in transformers.
_DEFAULTS = {kind: dict(patch_size=14, temporal_patch_size=2, merge_size=2,
                        size={"shortest_edge": 112**2, "longest_edge": 28**2 * most})
             for kind, most in (("Image", 15000), ("Video", 2 * 30000))}  # fmt: skip


class VideoMarksConfig(NativeResolutionConfig):
    """Images and frames of videos have the same token; `wiring` has the ids of the marks before and after a video."""

    frames_apart: ClassVar = True
    processors: ClassVar[Kinds] = {f"{name}{kind}Processor": defaults for name in ("Glm46V", "Glm4v")
                                   for kind, defaults in _DEFAULTS.items()}  # fmt: skip
    kinds: ClassVar[Mapping[PictureKind, str]] = {"image": "Glm46VImageProcessor", "video": "Glm46VVideoProcessor"}

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        return GlmPictures(settings=self.read_settings(folder, layout, ("image", "video")), config=self.vision,
                           whole_seconds=_WHOLE_SECONDS[self._processor(folder)])  # fmt: skip

    def _processor(self, folder: Path) -> str:
        """The processor that a folder names; the files that transformers asks, in its order."""
        for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
            named = (read_json(folder / file) or {}).get("processor_class")
            if named is not None:
                if named not in list(_WHOLE_SECONDS):
                    raise InputError(f"{folder / file}: processor_class={named!r} is not supported (supported: "
                                     f"{', '.join(_WHOLE_SECONDS)})")  # fmt: skip
                return named
        return "Glm4vProcessor" if self.family == "glm4v" else "Glm46VProcessor"

    @property
    @override
    def picture_tokens(self) -> dict[PictureKind, int | None]:
        return {"image": self.image_token, "video": _FRAME}

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        started, ended = (np.cumsum(tokens == mark, axis=1) for mark in self.wiring)
        in_video = (started > ended) & (tokens == self.image_token)
        return super().arrange(batch, np.where(in_video, _FRAME, tokens), valid, buckets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmPictures(Qwen3VlPictures):
    """Converts images and videos to patches."""

    spelled: ClassVar[Mapping[str, str]] = {"video": "<|video|>"}

    whole_seconds: bool  # of the time of a frame

    @override
    def frame(self, first: float, last: float, tokens: int) -> str:
        time = str(int(first)) if self.whole_seconds else f"{first:.1f} seconds"
        return f"<|begin_of_image|>{'<|image|>' * tokens}<|end_of_image|>{time}"

    @override
    def _scaled(self, height: int, width: int, kind: PictureKind, frames: int) -> tuple[int, int]:
        c = self.config
        count = c.frames if kind == "image" else frames  # an image is repeated
        return self.settings[kind].scaled_together(height, width, c.patch_size * c.merge, count, c.frames)
