"""LLaVA-1.5's pictures: one square each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vlkv.config import ClipConfig, ModelConfig
from vlkv.errors import InputError
from vlkv.processing.images import Picture, open_image
from vlkv.processing.pictures import Read, Video
from vlkv.processing.pixels import Layout, PixelSettings, read_settings, to_pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaPictures:
    """Reads pictures as the folder's settings say."""

    settings: PixelSettings
    side: int  # pixels that the tower takes
    tokens: int  # vision tokens of an image

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, layout: Layout) -> LlavaPictures:
        """Reads the settings; raises InputError where they are missing or not honoured."""
        assert isinstance(config.vision, ClipConfig)
        return cls(settings=read_settings(folder, layout), side=config.vision.image_size, tokens=config.vision.tokens)

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """One picture."""
        del images
        if isinstance(picture, Video):
            raise InputError("the model takes no video; give it frames as images")
        pixels = to_pixels(open_image(picture), self.settings)
        if pixels.shape != (3, self.side, self.side):
            raise InputError(
                f"the image processor config makes {pixels.shape[1]} x {pixels.shape[2]} pixels, but the "
                f"tower in config.json takes {self.side} x {self.side}: the files are not of one checkpoint"
            )
        return Read(arrays={"pixel_values": pixels}, tokens=self.tokens)

    def batch(self, reads: Sequence[Read]) -> dict[str, np.ndarray]:
        """`pixel_values` [I, 3, h, w]."""
        return {"pixel_values": np.stack([read.arrays["pixel_values"] for read in reads])} if reads else {}
