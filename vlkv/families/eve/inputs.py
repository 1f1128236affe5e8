"""EVE's images: all have the same longer side; the shorter side is rounded up to a step, so the shape is nearly kept.

They are cut into windows. A class token precedes each image, and an end-of-line token follows every line of windows.
All of these are vision tokens. Windows have a line and a column in the grid; class and end-of-line tokens have none
(-1), because they show no part of the image.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from einops import rearrange
from jaxtyping import Float
from typing_extensions import override

from vlkv.buckets import Buckets, round_up
from vlkv.errors import InputError
from vlkv.families.eve.patches import EvePatchesConfig
from vlkv.families.llava.vicuna import VicunaConfig
from vlkv.processing.arranging import OTHERS, PICTURE, Arranged, Batch, Mask, Tokens, arrange_entries, entries, padded
from vlkv.processing.pictures import Pictures, Read
from vlkv.processing.pixels import Layout, PixelSettings, to_pixels


class WindowsConfig(VicunaConfig):
    """Images of any shape, in windows."""

    whole_batch: ClassVar = {"pixels": ("vision",), "member": ("images", "vision")}

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> EvePictures:
        self.check_layout(layout)
        settings = PixelSettings.from_hf({"do_resize": False, "do_center_crop": False}, str(folder))
        return EvePictures(vision=self.vision, settings=settings)

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `ModelConfig.arrange`. `batch` has `pixel_values` [I, 4, S, S], whose last channel is the mask."""
        given = batch.get("pixel_values")
        windows = [] if given is None else [_windows(pixels, self.vision) for pixels in np.asarray(given, np.float32)]
        counts = [made.shape[0] * made.shape[1] for made in windows]
        first = np.cumsum([0, *counts])  # first window of each image
        made = [
            np.concatenate([[[OTHERS - i, 0, -1, -1]], entries(numbers.reshape(one.shape[:2]), 0, "line")])
            for i, (one, numbers) in enumerate(zip(windows, np.split(np.arange(first[-1]), first[1:-1]), strict=False))
        ]
        # Order of the vision embeddings: windows, the end-of-line token, class tokens.
        space = round_up(int(first[-1]), buckets.vision)
        fields, _ = arrange_entries(tokens, valid, {self.image_token: made}, buckets, newline=space, others=space + 1)
        if windows:
            member = np.zeros((round_up(len(windows), buckets.images), space), bool)
            for i in range(len(windows)):
                member[i, first[i] : first[i + 1]] = True
            pixels = np.concatenate([one.reshape(-1, *one.shape[2:]) for one in windows])
            fields |= {"pixels": padded(pixels, space), "layout": {"member": member}}
        return Arranged(**fields)

    @override
    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        c = self.vision
        width, height = c.target(PICTURE[1], PICTURE[0])
        pixels = np.zeros((pictures, 4, c.longest, c.longest), np.float32)
        pixels[:, 3, :height, :width] = 1
        return {"pixel_values": pixels}, pictures * c.tokens(width, height)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvePictures(Pictures):
    """Reads images in the way of the authors' code."""

    vision: EvePatchesConfig
    settings: PixelSettings

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """The image is put into the middle of a square; a fourth channel is 1 inside the image and 0 outside."""
        c = self.vision
        width, height = c.target(image.width, image.height)
        step = c.longest // c.coarse
        left, top = ((c.longest - side) // step // 2 * step for side in (width, height))
        resized = image.resize((width, height), PIL.Image.Resampling.BICUBIC)
        pixels = np.zeros((1, 4, c.longest, c.longest), np.float32)
        pixels[0, :, top : top + height, left : left + width] = np.concatenate(
            [to_pixels(resized, self.settings), np.ones((1, height, width), np.float32)]
        )
        return Read(arrays={"pixel_values": pixels}, tokens=c.tokens(width, height))


def _windows(pixels: Float[np.ndarray, "4 S S"], c: EvePatchesConfig) -> Float[np.ndarray, "lines columns 3 p p"]:
    if pixels.ndim != 3 or len(pixels) != 4:
        raise InputError(f"pixel_values of an image have shape {pixels.shape}, expected [4, S, S]: the last is a mask")
    mask = pixels[3] > 0
    lines, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    size = c.window_size
    if not mask.any() or mask.sum() != len(lines) * len(columns) or len(lines) % size or len(columns) % size:
        raise InputError(f"the mask of pixel_values must be a rectangle of whole windows of {size} x {size} pixels")
    shown = pixels[:3, lines[0] : lines[-1] + 1, columns[0] : columns[-1] + 1]
    return rearrange(shown, "c (y a) (x b) -> y x c a b", a=size, b=size)
