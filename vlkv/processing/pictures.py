"""How a family turns a picture or a video into what its layout reads: the seam, and videos.

A family's module in this package has a class with these two methods and a `from_folder`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vlkv.errors import InputError
from vlkv.processing.images import Picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Video:
    """Frames in order, as many as the model shall see, and how many of them make a second.

    Decoding a video file and choosing frames is left to a package made for it (PyAV, decord, OpenCV).
    """

    frames: Sequence[Picture]
    fps: float = 2.0  # frames a second, of the frames given

    def __post_init__(self) -> None:
        if not len(self.frames):
            raise InputError("a video needs at least one frame")
        if not self.fps > 0:
            raise InputError(f"a video's fps={self.fps!r} must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One picture or video, read."""

    arrays: dict[str, np.ndarray]
    tokens: int  # how often its token stands in the prompt
    # What stands in the prompt for it, where that is more than its token repeated: the image token `tokens` times,
    # with marks around.
    text: str | None = None


class Pictures(Protocol):
    """What the processor asks of a family."""

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """One picture or video, in a prompt of so many images; raises InputError for one that cannot be used."""

    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        """All of a batch, under the names and in the shapes of transformers' processor of the family."""
