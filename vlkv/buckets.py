"""Buckets: lengths and counts are rounded up to them, so that jit compiles few shapes."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Bounds in increasing order. After the last one, bounds continue with the last step.

    Attributes:
        text: text tokens of a row.
        images: images (or tiles, or frames) of a row and of a batch.
        vision: vision tokens of a row, for families with images of different sizes.
        patches: patches of one image, for towers that process images at native resolution.
    """

    # Each bound is another program to compile, which takes longer than many prompts. With these, 200 prompts of 100 to
    # 4,000 tokens need about 28 programs, and 4.5 % of what is processed is padding.
    text: tuple[int, ...] = (
        16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536,
        1664, 1792, 1920, 2048, 2304,
    )  # fmt: skip
    images: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 13, 16, 20)  # 13: twelve tiles and the thumbnail
    vision: tuple[int, ...] = (
        0, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096
    )  # fmt: skip
    patches: tuple[int, ...] = (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


_TILE = 16  # lengths that fit a data set are multiples of it, like segments of the cache


def round_up(n: int, bounds: tuple[int, ...]) -> int:
    """The smallest bound >= n."""
    step = bounds[-1] - bounds[-2] if len(bounds) > 1 else bounds[-1]
    return next((b for b in bounds if b >= n), bounds[-1] + -(-(n - bounds[-1]) // step) * step)


def merged(bounds: tuple[int, ...], lengths: Sequence[int], *, program: float) -> tuple[int, ...]:
    """The bounds without those that save less padding than another program costs, each with a bound that fits its rows.

    This is the length of the longest row below the bound, rounded up to a multiple of 16.

    Args:
        bounds: in increasing order.
        lengths: of all rows that will be processed, at least one. Bounds below the shortest and above the longest are
            unchanged.
        program: what compiling for another bound costs, in rows.
    """
    used = sorted({round_up(n, bounds) for n in lengths})
    kept = used[-1:]
    for bound in reversed(used[:-1]):
        if sum(n <= bound for n in lengths) * (1 - bound / kept[0]) > program:
            kept.insert(0, bound)
    longest = ((max(n for n in lengths if n <= bound), bound) for bound in kept)
    fitted = {min(-(-length // _TILE) * _TILE, bound) for length, bound in longest}
    # The bound after the longest keeps the step of the bounds beyond the last one.
    all_bounds = {*bounds, *used, round_up(used[-1] + 1, bounds)}
    return tuple(sorted(fitted | {b for b in all_bounds if b < used[0] or b > used[-1] or b in kept}))
