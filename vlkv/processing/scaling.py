"""Settings by which images and frames of any size are resized to whole tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vlkv.errors import InputError
from vlkv.processing.pixels import Kinds, PictureKind, PixelSettings, mismatch, with_defaults

_STEEPEST = 200  # greatest ratio of the two sides


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Settings of the image processor, or of the video processor."""

    least: float  # pixels of an image after resizing
    most: float
    pixels: PixelSettings  # for the resized image

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], source: str, kind: PictureKind, c: Any, processors: Kinds, named: str
    ) -> ScaleSettings:
        """Reads the settings of an image or video processor, a JSON object of the file `source`.

        `c` is the tower's config, a `NativeConfig`. `processors`: supported processors -> their defaults; `named`: the
        processor of a file that names none. Raises InputError for what is not supported, or contradicts config.json.
        """
        raw = {field: value for field, value in raw.items() if field != "size" or value is not None}
        s = with_defaults(raw, source, processors, named)
        for field, wanted in (("patch_size", c.patch_size), ("merge_size", c.merge), ("temporal_patch_size", c.frames)):
            if s[field] != wanted:
                raise mismatch(source, f"{field}={s[field]!r}", f"has {wanted}")
        if not s["do_resize"] or s.get("cap_pixels_per_frame"):
            field = "cap_pixels_per_frame" if s["do_resize"] else "do_resize"
            raise InputError(f"{source}: {field}={s[field]!r} is not supported")
        least, most = _limits(s, source, kind)
        plain = {"do_resize": False, "do_center_crop": False, "size": None}
        pixels = PixelSettings.from_hf({**s, **plain}, source, kinds=processors, default=named)
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


def _limits(s: Mapping[str, Any], source: str, kind: PictureKind) -> tuple[float, float]:
    """The least and the greatest number of pixels of an image, as transformers reads them."""
    size = s["size"]
    if not isinstance(size, Mapping):
        raise InputError(f"{source}: size={size!r} must be an object with shortest_edge and longest_edge")
    limits = dict(size)
    # Earlier versions of transformers called the limits `min_pixels` and `max_pixels`, and wrote them in both places.
    for edge, field in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if s.get("pixel_limits") and s.get(field) is not None:  # other classes ignore these fields
            limits[edge] = s[field]
            limits.pop(field, None)
    if set(limits) != {"shortest_edge", "longest_edge"}:
        raise InputError(f"{source}: size={size!r} must have shortest_edge and longest_edge, numbers of pixels")
    least, most = limits["shortest_edge"], limits["longest_edge"]
    numbers = all(isinstance(limit, int | float) and not isinstance(limit, bool) for limit in (least, most))
    if not numbers or not (0 < least < math.inf and 0 < most < math.inf):
        raise InputError(f"{source}: the limits of {least!r} and {most!r} pixels must be positive numbers")
    # A folder may only limit images; the default least number for videos may then be above that limit.
    if least > most and kind == "image":
        raise InputError(f"{source}: the limits of {least} and {most} pixels must be positive and in order")
    return least, most
