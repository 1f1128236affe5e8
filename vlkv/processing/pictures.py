"""How a family turns a picture or a video into arrays: the seam, videos, and pictures that become one square."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from jaxtyping import Float

from vlkv.errors import InputError
from vlkv.processing.images import Picture, open_image
from vlkv.processing.pixels import PixelSettings, to_pixels


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


class Pictures:
    """What the processor asks of a family; a family overrides `image`, and `video` if it takes videos."""

    # Kinds of picture that stand in the prompt as text alone: the tokenizer need not know their token.
    spelled: ClassVar[Mapping[str, str]] = {}

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """One picture or video, in a prompt of so many images; raises InputError for one that cannot be used."""
        return self.video(picture) if isinstance(picture, Video) else self.image(open_image(picture), images)

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """One picture, in RGB."""
        raise NotImplementedError

    def video(self, video: Video) -> Read:
        """One video."""
        raise InputError("the model takes no video; give it frames as images")

    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        """All of a batch, under the names and in the shapes of transformers' processor of the family.

        Pixels of all pictures are joined along their first axis, everything else has a row for each.
        """
        found = by_name(reads)
        join = {name: np.concatenate if name.startswith("pixel") else np.stack for name in found}
        return {name: join[name](arrays) for name, arrays in found.items()}


def by_name(reads: Sequence[Read]) -> dict[str, list[np.ndarray]]:
    """The arrays of each name."""
    names = dict.fromkeys(name for read in reads for name in read.arrays)
    return {name: [read.arrays[name] for read in reads if name in read.arrays] for name in names}


def to_square(image: PIL.Image.Image, settings: PixelSettings, side: int) -> Float[np.ndarray, "3 side side"]:
    """A picture as the tower wants it; InputError where the settings make another size of it."""
    pixels = to_pixels(image, settings)
    if pixels.shape != (3, side, side):
        raise InputError(
            f"the image processor config makes {pixels.shape[1]} x {pixels.shape[2]} pixels, but the "
            f"tower in config.json takes {side} x {side}: the files are not of one checkpoint"
        )
    return pixels


def tiles_of(image: PIL.Image.Image, side: int) -> list[PIL.Image.Image]:
    """A picture cut into squares, row by row."""
    corners = [(x, y) for y in range(0, image.height, side) for x in range(0, image.width, side)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquarePictures(Pictures):
    """Every picture becomes one square."""

    settings: PixelSettings
    side: int  # pixels that the tower takes
    tokens: int  # vision tokens of an image

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """One picture."""
        return Read(arrays={"pixel_values": to_square(image, self.settings, self.side)[None]}, tokens=self.tokens)
