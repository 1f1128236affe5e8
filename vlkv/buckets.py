"""Bounds that lengths and counts are rounded up to, so that jit sees few shapes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Past the last bound, further steps like the last one.

    Attributes:
        text: text tokens of a row.
        images: images (or tiles, or frames) of a row and of a batch.
        vision: vision tokens of a row, for families whose images differ in size.
        patches: patches of one image, for towers that take images at their own size.
    """

    text: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    images: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 13, 16, 20)  # 13: twelve tiles and the thumbnail
    vision: tuple[int, ...] = (0, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    patches: tuple[int, ...] = (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def round_up(n: int, bounds: tuple[int, ...]) -> int:
    """The smallest bound >= n, or as many steps past the last one as it takes."""
    step = bounds[-1] - bounds[-2] if len(bounds) > 1 else bounds[-1]
    return next((b for b in bounds if b >= n), bounds[-1] + -(-(n - bounds[-1]) // step) * step)
