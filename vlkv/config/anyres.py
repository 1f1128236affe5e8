"""Pictures of any resolution and videos, as LLaVA-NeXT, OneVision and Video lay them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from vlkv.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoPooling:
    """What becomes of the patches of a video's frame.

    Attributes:
        mode: how a frame's patches become fewer: means of squares, or the frame resized.
        stride: how many times fewer there are per side; what is left over a mean drops and a resized frame keeps.
        newline: where the newline embedding stands: after every line, after every frame, after the video, nowhere.
        before_projector: whether patches are pooled before they are projected, or after.
    """

    mode: Literal["average", "bilinear"]
    stride: int = 2
    newline: Literal["line", "frame", "video", "none"] = "none"
    before_projector: bool = False

    @property
    def taps(self) -> int:
        """Patches that make one token."""
        return 4 if self.mode == "bilinear" else self.stride**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyRes:
    """The family's own settings.

    Attributes:
        pinpoints: heights and widths, in pixels, that a picture may be resized to and cut into tiles from.
        most_tiles: with more patches than this many tiles have, the stitched patches are resized; None: never.
        only_alone: whether a picture is cut into tiles only where it is the only one of its prompt.
        rounded: whether the height and width without padding are rounded to 7 digits, as transformers does, before
            they are cut to a whole number; the original code does not.
        video: None for a family without video.
    """

    pinpoints: tuple[tuple[int, int], ...]
    most_tiles: int | None = None
    only_alone: bool = False
    rounded: bool = True
    video: VideoPooling | None = None

    @property
    def taps(self) -> int:
        """Patches that make one token at most; 0 where each token is one patch."""
        return max(0 if self.most_tiles is None else 4, 0 if self.video is None else self.video.taps)


def pinpoints(value: Any, side: int) -> tuple[tuple[int, int], ...]:
    """Checks `image_grid_pinpoints`: pairs of pixels, each a multiple of a tile's side; InputError otherwise."""
    whole = isinstance(value, Sequence) and all(
        isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair)
        for pair in value
    )
    if not whole or not value:
        raise InputError(f"config.json: image_grid_pinpoints={value!r} must be a list of [height, width]")
    for pair in value:
        if any(n % side for n in pair):
            raise InputError(f"config.json: image_grid_pinpoints has {list(pair)}: not whole tiles of {side} pixels")
    return tuple((int(pair[0]), int(pair[1])) for pair in value)


def most_tiles(value: Any, field: str = "vision_aspect_ratio") -> int:
    """The number in anyres_max_9; InputError for another kind."""
    number = value.removeprefix("anyres_max_") if isinstance(value, str) and value.startswith("anyres_max_") else ""
    if not number.isdecimal() or not int(number):
        raise InputError(f"config.json: {field}={value!r} is not supported (only anyres_max_N)")
    return int(number)
