"""Pictures of Qwen2-VL and Qwen2.5-VL: scaled to whole tokens between two bounds of pixels, cut into patches.

Frames of a video are scaled like images, by bounds of their own; which frames to show is the caller's choice. Where
transformers resizes them with torchvision, here PIL does, as for images.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from einops import rearrange
from jaxtyping import Float

from vlkv.config import ModelConfig, QwenVisionConfig
from vlkv.errors import InputError
from vlkv.files import read_json
from vlkv.processing.images import Picture, check_area, open_image
from vlkv.processing.pictures import Read, Video
from vlkv.processing.pixels import Layout, find_settings, normalise

_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")
# The class defaults of transformers, which a file may leave out.
_DEFAULTS: dict[str, Any] = dict(
    do_resize=True, resample=3, do_rescale=True, rescale_factor=1 / 255, do_normalize=True,
    image_mean=(0.48145466, 0.4578275, 0.40821073), image_std=(0.26862954, 0.26130258, 0.27577711),
    patch_size=14, temporal_patch_size=2, merge_size=2,
)  # fmt: skip
_PIXELS = {"image": (56 * 56, 28 * 28 * 1280), "video": (128 * 28 * 28, 28 * 28 * 768)}
_STEEPEST = 200  # the most that one side may be of the other


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """What is done to an image, or to each frame of a video."""

    least: int  # pixels of a picture, once scaled
    most: int
    resample: PIL.Image.Resampling
    scale: float | None  # usually 1 / 255
    mean: tuple[float, float, float]
    std: tuple[float, float, float] | None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str, kind: str, c: QwenVisionConfig) -> ScaleSettings:
        """Reads an image or video processor config; `kind` says what it is used for.

        Raises:
            InputError: a kind of processor or a setting that we do not honour, or that config.json contradicts.
        """
        name = str(raw.get("image_processor_type", raw.get("video_processor_type", _KINDS[0])))
        if name.removesuffix("Fast").removesuffix("Pil") not in _KINDS:
            raise InputError(f"{source}: the processor {name!r} is not supported (supported: {', '.join(_KINDS)})")
        s = {**_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
        for field, wanted in (("patch_size", c.patch_size), ("merge_size", c.merge), ("temporal_patch_size", c.frames)):
            if s[field] != wanted:
                raise InputError(f"{source}: {field}={s[field]!r}, but the tower in config.json has {wanted}: the "
                                 "files are not of one checkpoint")  # fmt: skip
        for field, wanted in (("do_resize", True), ("cap_pixels_per_frame", False)):
            if bool(s.get(field, wanted)) != wanted:
                raise InputError(f"{source}: {field}={s[field]!r} is not supported")
        try:
            least, most = _bounds(s, kind)
            return cls(
                least=least,
                most=most,
                resample=PIL.Image.Resampling(s["resample"]),
                scale=float(s["rescale_factor"]) if s["do_rescale"] else None,
                mean=tuple(map(float, s["image_mean"])),  # type: ignore[arg-type]
                std=tuple(map(float, s["image_std"])) if s["do_normalize"] else None,  # type: ignore[arg-type]
            )
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"{source}: a setting of the image processor makes no sense ({error})") from None

    def scaled(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """Height and width of whole tokens of `factor` pixels, about the shape of the picture and within the bounds.

        Python's rounding to even is part of it. Raises InputError for a picture that is too long and thin.
        """
        if max(height, width) > _STEEPEST * min(height, width):
            raise InputError(f"the {width} x {height} image is too long and thin: one side may be at most {_STEEPEST} "
                             "times the other; crop it")  # fmt: skip
        nearest = round(height / factor) * factor * round(width / factor) * factor
        shrink, stretch = math.sqrt(height * width / self.most), math.sqrt(self.least / (height * width))

        def whole(side: int) -> int:
            if nearest > self.most:
                return max(factor, math.floor(side / shrink / factor) * factor)
            if nearest < self.least:
                return math.ceil(side * stretch / factor) * factor
            return round(side / factor) * factor

        return whole(height), whole(width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenPictures:
    """Reads pictures as the folder's settings say."""

    image: ScaleSettings
    video: ScaleSettings
    config: QwenVisionConfig

    @classmethod
    def from_folder(cls, folder: Path, config: ModelConfig, layout: Layout) -> QwenPictures:
        """Reads the settings; raises InputError where they are missing or not honoured."""
        c = config.vision
        assert isinstance(c, QwenVisionConfig)
        if layout != "checkpoint":
            raise InputError(f"layout={layout!r} is for towers of one square; {config.family} keeps a picture's shape")
        return cls(
            image=ScaleSettings.from_hf(*find_settings(folder), "image", c),
            video=ScaleSettings.from_hf(*_video_settings(folder), "video", c),
            config=c,
        )

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """One image or video; how many `images` its prompt has does not matter."""
        del images
        if isinstance(picture, Video):
            frames = [open_image(frame) for frame in picture.frames]
            if len({frame.size for frame in frames}) > 1:
                raise InputError("the frames of a video differ in size; scale them to one")
            patches, grid = self._patches(frames, self.video)
            seconds = np.array(self.config.frames / picture.fps)
            arrays = {"pixel_values_videos": patches, "video_grid_thw": grid, "second_per_grid_ts": seconds}
        else:
            patches, grid = self._patches([open_image(picture)], self.image)
            arrays = {"pixel_values": patches, "image_grid_thw": grid}
        return Read(arrays=arrays, tokens=int(grid.prod()) // self.config.merge**2)

    def batch(self, reads: Sequence[Read]) -> dict[str, np.ndarray]:
        """`pixel_values` [patches, C], `image_grid_thw` [images, 3]; of videos the same and `second_per_grid_ts`."""
        found: dict[str, list[np.ndarray]] = {}
        for read in reads:
            for name, array in read.arrays.items():
                found.setdefault(name, []).append(array)
        join = {name: np.concatenate if name.startswith("pixel") else np.stack for name in found}
        return {name: join[name](arrays) for name, arrays in found.items()}

    def _patches(
        self, frames: Sequence[PIL.Image.Image], settings: ScaleSettings
    ) -> tuple[Float[np.ndarray, "patches C"], np.ndarray]:
        """Patches of all frames, and how many in time, lines and columns."""
        c = self.config
        height, width = settings.scaled(frames[0].height, frames[0].width, c.patch_size * c.merge)
        check_area(width, height, f"the {frames[0].width} x {frames[0].height} image, once resized")
        pixels = [
            normalise(np.asarray(frame.resize((width, height), resample=settings.resample)), settings.scale,
                      settings.mean, settings.std)
            for frame in frames
        ]  # fmt: skip
        pixels += pixels[-1:] * (-len(pixels) % c.frames)  # a single image, or the last frame, is repeated
        patches = rearrange(
            np.stack(pixels), "(t f) c (y a p) (x b q) -> (t y x a b) (c f p q)",
            f=c.frames, a=c.merge, b=c.merge, p=c.patch_size, q=c.patch_size,
        )  # fmt: skip
        return patches, np.array([len(pixels) // c.frames, height // c.patch_size, width // c.patch_size])


def _bounds(s: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """The least and the most pixels, under any of the names that versions of transformers have given them."""
    size = s.get("size") or {}
    least, most = _PIXELS[kind]
    least = s.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or least
    most = s.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or most
    if not 0 < least <= most:
        raise ValueError(f"bounds of {least} and {most} pixels")
    return least, most


def _video_settings(folder: Path) -> tuple[Mapping[str, Any], str]:
    """The video processor's own, or else the image processor's: before there was one, that served both."""
    path = folder / "processor_config.json"
    nested = (read_json(path) or {}).get("video_processor")
    if isinstance(nested, dict):
        return nested, str(path)
    path = folder / "video_preprocessor_config.json"
    raw = read_json(path)
    return find_settings(folder) if raw is None else (raw, str(path))
