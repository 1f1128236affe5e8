"""The pictures of LLaVA-NeXT, OneVision and Video: the whole as one tile and, larger, cut into tiles; and frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from jaxtyping import Float

from vlkv.config import ClipConfig, ModelConfig, SiglipConfig
from vlkv.errors import InputError
from vlkv.layouts.anyres import best_resolution, fitted
from vlkv.layouts.llava_next import picture_tokens, video_tokens
from vlkv.processing.images import Picture, check_area, open_image
from vlkv.processing.pictures import Read, Video
from vlkv.processing.pixels import Layout, PixelSettings, find_settings, to_pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlavaNextPictures:
    """Reads pictures and videos as the folder's settings say."""

    config: ModelConfig
    image: PixelSettings
    frame: PixelSettings | None  # None: no video

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, layout: Layout) -> LlavaNextPictures:
        """Reads the settings; raises InputError where they are missing, not honoured or not those of config.json."""
        if layout != "checkpoint":
            raise InputError(f"layout={layout!r}: {config.family} takes pictures of any shape; leave it out")
        assert isinstance(config.vision, ClipConfig | SiglipConfig)
        size = {"height": config.vision.image_size, "width": config.vision.image_size}
        # Original checkpoints do not say what becomes of pixels: what the tower was trained on.
        siglip = isinstance(config.vision, SiglipConfig)
        default = {"image_processor_type": "SiglipImageProcessor", "size": size} if siglip else None
        raw, source = find_settings(folder, default=default)
        points = raw.get("image_grid_pinpoints")
        if points is not None and tuple(map(tuple, points)) != config.wiring.pinpoints:
            raise InputError(f"{source}: image_grid_pinpoints are not those of config.json: "
                             "the files are not of one checkpoint")  # fmt: skip
        image = PixelSettings.from_hf(raw, source)
        frame = PixelSettings.from_hf(*find_settings(folder, "video", default)) if config.wiring.video else None
        return cls(config=config, image=image, frame=frame)

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """A picture becomes its tiles, a video its frames."""
        if isinstance(picture, Video):
            if self.frame is None:
                raise InputError("the model takes no video; give it frames as images")
            frames = [self._tile(open_image(frame), self.frame) for frame in picture.frames]
            return Read(arrays={"pixel_values_videos": np.stack(frames)}, tokens=video_tokens(self.config, len(frames)))
        image = open_image(picture)
        size, wiring = (image.height, image.width), self.config.wiring
        if wiring.only_alone and images > 1:
            tiles = [self._tile(image, dataclasses.replace(self.image, square=True))]
        else:
            parts = [self._whole(image), *self._parts(image, best_resolution(size, wiring.pinpoints))]
            tiles = [self._tile(part, self.image) for part in parts]
        arrays = {
            "pixel_values": np.stack(tiles),
            "image_sizes": np.array(size),
            "images": np.array(images),
        }
        return Read(arrays=arrays, tokens=picture_tokens(self.config, size, alone=images == 1))

    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        """`pixel_values` [I, tiles, 3, h, w] padded with black tiles, `image_sizes`, `batch_num_images`; and videos."""
        images = [read.arrays for read in reads if "pixel_values" in read.arrays]
        videos = [read.arrays["pixel_values_videos"] for read in reads if "pixel_values_videos" in read.arrays]
        made: dict[str, Any] = {}
        if images:
            made["pixel_values"] = _padded([arrays["pixel_values"] for arrays in images])
            made["image_sizes"] = np.stack([arrays["image_sizes"] for arrays in images])
            numbers, at = [], 0
            while at < len(images):
                numbers.append(int(images[at]["images"]))
                at += numbers[-1]
            made["batch_num_images"] = np.array(numbers)
        if videos:
            made["pixel_values_videos"] = videos  # a list, because they may differ in length
        return made

    @property
    def _side(self) -> int:
        assert isinstance(self.config.vision, ClipConfig | SiglipConfig)
        return self.config.vision.image_size

    def _whole(self, image: PIL.Image.Image) -> PIL.Image.Image:
        return image.resize((self._side, self._side), resample=self.image.resample)

    def _parts(self, image: PIL.Image.Image, target: tuple[int, int]) -> list[PIL.Image.Image]:
        """The picture resized, on black, in tiles, row by row."""
        height, width = fitted((image.height, image.width), target)
        check_area(width, height, f"the {image.width} x {image.height} image, once resized")
        canvas = PIL.Image.new("RGB", (target[1], target[0]))
        corner = (target[1] - width) // 2, (target[0] - height) // 2
        canvas.paste(image.resize((width, height), resample=self.image.resample), corner)
        side = self._side
        return [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, target[0], side)
            for left in range(0, target[1], side)
        ]

    def _tile(self, image: PIL.Image.Image, settings: PixelSettings) -> Float[np.ndarray, "3 h w"]:
        pixels = to_pixels(image, settings)
        if pixels.shape[1:] != (self._side, self._side):
            raise InputError(
                f"the image processor config makes {pixels.shape[1]} x {pixels.shape[2]} pixels, but the "
                f"tower in config.json takes {self._side} x {self._side}: the files are not of one checkpoint"
            )
        return pixels


def _padded(pictures: Sequence[Float[np.ndarray, "tiles 3 h w"]]) -> Float[np.ndarray, "I most 3 h w"]:
    most = max(map(len, pictures))
    return np.stack([np.pad(one, [(0, most - len(one)), (0, 0), (0, 0), (0, 0)]) for one in pictures])
