"""EVE's pictures: of one length on the longer side, on the shorter as near their shape as whole steps allow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL.Image

from vlkv.config import EveVisionConfig, ModelConfig
from vlkv.errors import InputError
from vlkv.layouts.eve import picture_tokens
from vlkv.processing.images import Picture, open_image
from vlkv.processing.pictures import Read, Video
from vlkv.processing.pixels import Layout, PixelSettings, to_pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvePictures:
    """Reads pictures as the authors' code does, which has no settings but the patch layer's."""

    vision: EveVisionConfig
    settings: PixelSettings

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, layout: Layout) -> EvePictures:
        """Raises InputError for a layout that the model does not know."""
        assert isinstance(config.vision, EveVisionConfig)
        if layout != "checkpoint":
            raise InputError(f"layout={layout!r} is not for this model, whose pictures keep their shape; leave it out")
        settings = PixelSettings.from_hf({"do_resize": False, "do_center_crop": False}, str(folder))
        return cls(vision=config.vision, settings=settings)

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """One picture, in the middle of a square, with a mask."""
        del images
        if isinstance(picture, Video):
            raise InputError("the model takes no video; give it frames as images")
        image = open_image(picture)
        c = self.vision
        width, height = self.target(image.width, image.height)
        step = c.longest // c.coarse
        left, top = ((c.longest - side) // step // 2 * step for side in (width, height))
        resized = image.resize((width, height), PIL.Image.Resampling.BICUBIC)
        pixels = np.zeros((4, c.longest, c.longest), np.float32)
        pixels[:, top : top + height, left : left + width] = np.concatenate(
            [to_pixels(resized, self.settings), np.ones((1, height, width), np.float32)]
        )
        tokens = picture_tokens(height // c.window_size, width // c.window_size)
        return Read(arrays={"pixel_values": pixels}, tokens=tokens)

    def target(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in pixels."""
        c = self.vision
        # In the units of the teacher of its training (336 pixels, steps of 14), or rounding would differ.
        steps = math.ceil(336 * min(width, height) / max(width, height) / 14)
        short = steps * (c.longest // c.coarse)
        return (c.longest, short) if width > height else (short, c.longest)

    def batch(self, reads: Sequence[Read]) -> dict[str, np.ndarray]:
        """`pixel_values` [I, 4, S, S]."""
        return {"pixel_values": np.stack([read.arrays["pixel_values"] for read in reads])} if reads else {}
