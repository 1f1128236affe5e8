"""Converts an RGB image to the tower's pixels, according to the checkpoint's image processor config.

The steps are those of transformers' CLIP image processor with PIL: resize (8 bits per channel), centre crop, rescale,
normalise. With `layout="pad"` the image is first padded to a square with the mean colour.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import PIL.Image
from jaxtyping import Float

from vlkv.errors import InputError
from vlkv.files import class_defaults, read_json
from vlkv.processing.images import check_area

Layout: TypeAlias = Literal["checkpoint", "pad", "pan_and_scan"]
PictureKind: TypeAlias = Literal["image", "video"]
Kinds: TypeAlias = Mapping[str, Mapping[str, Any]]

# Class defaults in transformers, for fields that a file leaves out.
_DEFAULTS: dict[str, Any] = dict(
    do_resize=True, size={"shortest_edge": 224}, default_to_square=False, resample=3, do_center_crop=True,
    crop_size=224, do_rescale=True, rescale_factor=1 / 255, do_normalize=True, do_pad=False,
    image_mean=(0.48145466, 0.4578275, 0.40821073), image_std=(0.26862954, 0.26130258, 0.27577711),
)  # fmt: skip
# Each step, and the settings that it needs.
_STEPS = {"do_resize": ("size", "resample"), "do_center_crop": ("crop_size",), "do_rescale": ("rescale_factor",),
          "do_normalize": ("image_mean", "image_std"), "do_pad": ()}  # fmt: skip
_HALVES = dict(image_mean=0.5, image_std=0.5, size={"height": 224, "width": 224}, do_center_crop=False, crop_size=None)
# Image processors that every model may name -> their defaults that differ from `_DEFAULTS`. A family adds its own.
# `padding="square"` marks processors whose `do_pad` pads to a square.
CLIP = "CLIPImageProcessor"
KINDS: dict[str, dict[str, Any]] = {CLIP: {}, "CLIPFeatureExtractor": {}, "SiglipImageProcessor": _HALVES}
_KIND_FIELDS = ("video_processor_type", "image_processor_type", "feature_extractor_type")
# Video processors that are named like their model's image processor: a folder that names only that one means both.
_VIDEO_LIKE_IMAGE = class_defaults("video_like_image")
NO_VIDEO = ("the folder has no settings for videos: copy video_preprocessor_config.json from the checkpoint's source, "
            "or give the frames as images")  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """Settings of an image processor. A step with the setting None is skipped."""

    square: bool  # pad to a square first
    shortest_edge: int | None  # pixels; resizing keeps the aspect ratio
    size: tuple[int, int] | None  # (height, width); resizing changes the aspect ratio
    resample: PIL.Image.Resampling
    crop: tuple[int, int] | None  # (height, width)
    scale: float | None  # usually 1 / 255
    mean: tuple[float, float, float]  # also the colour of padding
    std: tuple[float, float, float] | None
    whole: tuple[int, int] | None = None  # (height, width) of `size`; of a shortest edge, its square
    tile: int | None = None  # height of `crop_size`, else of `whole`


class RawSettings(NamedTuple):
    """The settings of an image or video processor: a JSON object, and the file that contains it."""

    fields: Mapping[str, Any]
    source: str
    kinds: Kinds = KINDS  # supported processors -> their defaults
    default: str = CLIP  # the processor of a file that names none

    def error(self, problem: str) -> InputError:
        """An error that names the file."""
        return InputError(f"{self.source}: {problem}")

    def mismatch(self, what: str, wanted: str) -> InputError:
        """The error for settings that do not fit the tower, which "has" or "takes" something else."""
        return self.error(f"{what}, but the tower in config.json {wanted}: the files belong to different checkpoints")

    def filled(self) -> dict[str, Any]:
        """The fields, and the defaults of their class for those that are missing.

        As in transformers, null is a value and not the default: a step that is null is skipped. Raises InputError for
        an unsupported processor, or a step that is not true or false, or lacks a setting.
        """
        named = (self.fields[field] for field in _KIND_FIELDS if self.fields.get(field) is not None)
        kind = str(next(named, self.default)).removesuffix("Fast").removesuffix("Pil")
        if kind not in self.kinds:
            known = ", ".join(self.kinds)
            raise self.error(f"image_processor_type={kind!r} is not supported (supported: {known})")
        c = {**_DEFAULTS, **self.kinds[kind], **self.fields}
        for step, needed in _STEPS.items():
            c[step] = False if c[step] is None else c[step]
            if not isinstance(c[step], bool):
                raise self.error(f"{step}={c[step]!r} must be true or false")
            for field in needed:
                if c[step] and c[field] is None:
                    raise self.error(f"{field} is null, but {step} needs it")
        return c

    def pixels(self, layout: Layout = "checkpoint", **changed: Any) -> PixelSettings:
        """The settings with changed fields; InputError for what is not supported. `layout="pad"`: pad to a square."""
        c = self._replace(fields={**self.fields, **changed}).filled()
        for field in ("pad_size", "use_square_size"):
            if c.get(field):
                raise self.error(f"{field}={c[field]!r} is not supported")
        padded = c.get("image_aspect_ratio") == "pad" or (c["do_pad"] and c.get("padding") == "square")
        try:
            edge, size = _resize_target(c["size"], c["default_to_square"]) if c["do_resize"] else (None, None)
            whole, crop = _rectangle(c["size"]), _rectangle(c["crop_size"])
            return PixelSettings(
                square=bool(padded or layout == "pad"),
                shortest_edge=edge,
                size=size,
                resample=PIL.Image.Resampling(2 if c["resample"] is None else c["resample"]),
                crop=_height_width(c["crop_size"]) if c["do_center_crop"] else None,
                scale=float(c["rescale_factor"]) if c["do_rescale"] else None,
                mean=(0.0, 0.0, 0.0) if c["image_mean"] is None else _triple(c["image_mean"]),
                std=_triple(c["image_std"]) if c["do_normalize"] else None,
                whole=whole,
                tile=(crop or whole or (None,))[0],
            )
        except (TypeError, ValueError, KeyError) as error:
            raise self.error(f"a setting of the image processor is not valid ({error})") from None


def find_settings(
    folder: Path, kinds: Kinds = KINDS, default: str = CLIP, otherwise: Mapping[str, Any] | None = None
) -> RawSettings:
    """A folder's settings for images, else `otherwise`; InputError if both are missing.

    The file is `processor_config.json` (transformers 5) or `preprocessor_config.json` (4).
    """
    path = folder / "preprocessor_config.json"
    fields, source = _nested(folder, "image") or (read_json(path) or otherwise, str(path))
    if fields is None:
        raise InputError(f"{path}: no such file, but the model needs it for images; copy it from the checkpoint")
    return RawSettings(fields, source, kinds, default)


def find_video_settings(folder: Path, kinds: Kinds, default: str = CLIP) -> RawSettings | None:
    """A folder's settings for videos; None if videos are not supported with it.

    The files are those of transformers, in its order. The last one has the settings for images too, and transformers
    then chooses the class by the name of the image processor, else by the model.
    """
    nested = _nested(folder, "video")
    if nested is not None:
        return RawSettings(*nested, kinds, default)
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        raw = read_json(folder / name)
        if raw is not None:
            fields = {field: value for field, value in raw.items() if field not in _KIND_FIELDS[1:]}
            named = str(raw.get("image_processor_type")).replace("ImageProcessor", "VideoProcessor")
            if named in _VIDEO_LIKE_IMAGE and fields.get("video_processor_type") is None:
                fields["video_processor_type"] = named
                if named not in kinds:
                    return None
            return RawSettings(fields, str(folder / name), kinds, default)
    return None


def _nested(folder: Path, part: PictureKind) -> tuple[dict[str, Any], str] | None:
    """The settings in `processor_config.json`; None if it has none."""
    path = folder / "processor_config.json"
    nested = (read_json(path) or {}).get(f"{part}_processor")
    if not isinstance(nested, dict | None):
        raise InputError(f"{path}: {part}_processor={nested!r} must be an object")
    return None if nested is None else (nested, str(path))


def to_pixels(image: PIL.Image.Image, settings: PixelSettings) -> Float[np.ndarray, "3 h w"]:
    """Converts an RGB image to the pixels of the tower, normalised (about -2 to 2 with CLIP's mean and deviation).

    Raises InputError if the resized or padded image would exceed PIL's limit of pixels.
    """
    if settings.square:
        image = _pad_square(image, settings.mean)
    target = settings.size
    if settings.shortest_edge is not None:
        short, long = sorted(image.size)
        other = int(settings.shortest_edge * long / short)  # rounds down, as transformers does
        narrow = image.width <= image.height
        target = (other, settings.shortest_edge) if narrow else (settings.shortest_edge, other)
    if target is not None:
        check_area(target[1], target[0], f"the {image.width} x {image.height} image, after resizing")
        image = image.resize((target[1], target[0]), resample=settings.resample)
    if settings.crop is not None:  # the middle; PIL adds black if the image is too small
        height, width = settings.crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image)  # [h, w, 3], 8 bits
    # The precision of each step is that of transformers: float64 for the product, float32 for the rest.
    values: np.ndarray = (pixels if settings.scale is None else pixels * np.float64(settings.scale)).astype(np.float32)
    if settings.std is not None:
        values = (values - np.array(settings.mean, np.float32)) / np.array(settings.std, np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def _pad_square(image: PIL.Image.Image, mean: tuple[float, float, float]) -> PIL.Image.Image:
    side = max(image.size)
    check_area(side, side, f"the {image.width} x {image.height} image, after padding to a square")
    square = PIL.Image.new("RGB", (side, side), tuple(int(channel * 255) for channel in mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _resize_target(size: object, square: object) -> tuple[int | None, tuple[int, int] | None]:
    """`(shortest_edge, None)` or `(None, (height, width))`; a bare number is the side of a square if `square` is."""
    if isinstance(size, int) and not square:
        size = {"shortest_edge": size}
    if isinstance(size, dict) and set(size) == {"shortest_edge"}:
        return _positive(size["shortest_edge"]), None
    return None, _height_width(size)


def _rectangle(size: object) -> tuple[int, int] | None:
    """(height, width) of a size in any form; None if it has none."""
    if isinstance(size, Mapping):
        edges = (size.get("height"), size.get("width")), (size.get("shortest_edge"),) * 2
        size = next((pair for pair in edges if all(pair)), None)
    return None if size is None else _height_width(size)


def _height_width(size: object) -> tuple[int, int]:
    if isinstance(size, int):
        size = (size, size)
    if isinstance(size, dict) and set(size) == {"height", "width"}:
        size = (size["height"], size["width"])
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise ValueError(f"a size of {size!r}")
    return _positive(size[0]), _positive(size[1])


def _positive(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{number!r} pixels")
    return number


def _triple(value: object) -> tuple[float, float, float]:
    if isinstance(value, int | float):
        value = (value,) * 3
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise ValueError(f"{value!r} for three channels")
    return float(value[0]), float(value[1]), float(value[2])


_STEEPEST = 200  # greatest ratio of the two sides


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Settings of the image processor, or of the video processor."""

    least: float  # pixels of an image after resizing
    most: float
    pixels: PixelSettings  # for the resized image

    @classmethod
    def of(cls, settings: RawSettings, kind: PictureKind, c: Any) -> ScaleSettings:
        """The settings of images or videos for a tower; InputError for what is not supported or does not fit it.

        `c` is the tower's config, a `NativeConfig`.
        """
        fields = {field: value for field, value in settings.fields.items() if field != "size" or value is not None}
        s = settings._replace(fields=fields).filled()
        for field, wanted in (("patch_size", c.patch_size), ("merge_size", c.merge), ("temporal_patch_size", c.frames)):
            if s[field] != wanted:
                raise settings.mismatch(f"{field}={s[field]!r}", f"has {wanted}")
        if not s["do_resize"] or s.get("cap_pixels_per_frame"):
            field = "cap_pixels_per_frame" if s["do_resize"] else "do_resize"
            raise settings.error(f"{field}={s[field]!r} is not supported")
        least, most = _limits(s, settings, kind)
        pixels = settings.pixels(do_resize=False, do_center_crop=False, size=None)
        return cls(least=least, most=most, pixels=pixels)

    def scaled_together(self, height: int, width: int, factor: int, frames: int, size: int) -> tuple[int, int]:
        """Like `scaled`, for all frames of a video: `size` frames make a patch.

        A frame that is smaller than a token is enlarged first.
        """
        if min(height, width) < factor:
            enlarge = max(factor / height, factor / width)
            height, width = int(height * enlarge), int(width * enlarge)
        return self.scaled(height, width, factor, frames, round(frames / size) * size)

    def scaled(self, height: int, width: int, factor: int, frames: int = 1, rounded: int = 1) -> tuple[int, int]:
        """Height and width after resizing: multiples of `factor` pixels, within the limits, nearly the same shape.

        The limits apply to `frames` frames together; `rounded` is their number after rounding to whole patches along
        time. Halves are rounded to even, like in the reference. Raises InputError if the image is too long and thin.
        """
        if max(height, width) > _STEEPEST * min(height, width):
            raise InputError(f"the {width} x {height} image is too long and thin: one side may be at most {_STEEPEST} "
                             "times the other; crop it")  # fmt: skip
        nearest = rounded * round(height / factor) * factor * round(width / factor) * factor
        area = frames * height * width
        shrink, stretch = math.sqrt(area / self.most), math.sqrt(self.least / area)

        def resized(side: int) -> int:
            if nearest > self.most:
                return max(factor, math.floor(side / shrink / factor) * factor)
            if nearest < self.least:
                return math.ceil(side * stretch / factor) * factor
            return round(side / factor) * factor

        return resized(height), resized(width)


def _limits(s: Mapping[str, Any], settings: RawSettings, kind: PictureKind) -> tuple[float, float]:
    """The least and the greatest number of pixels of an image, as transformers reads them."""
    size = s["size"]
    if not isinstance(size, Mapping):
        raise settings.error(f"size={size!r} must be an object with shortest_edge and longest_edge")
    limits = dict(size)
    # Earlier versions of transformers called the limits `min_pixels` and `max_pixels`, and wrote them in both places.
    for edge, field in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if s.get("pixel_limits") and s.get(field) is not None:  # other classes ignore these fields
            limits[edge] = s[field]
            limits.pop(field, None)
    if set(limits) != {"shortest_edge", "longest_edge"}:
        raise settings.error(f"size={size!r} must have shortest_edge and longest_edge, numbers of pixels")
    least, most = limits["shortest_edge"], limits["longest_edge"]
    numbers = all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in (least, most))
    if not numbers or not (0 < least < math.inf and 0 < most < math.inf):
        raise settings.error(f"the limits of {least!r} and {most!r} pixels must be positive numbers")
    # A folder may only limit images; the default least number for videos may then be above that limit.
    if least > most and kind == "image":
        raise settings.error(f"the limits of {least} and {most} pixels must be positive and in order")
    return least, most
