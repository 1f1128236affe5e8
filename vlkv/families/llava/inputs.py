"""LLaVA-1.5's pictures: every one is one square of patches, in raster order. All of them are vision tokens."""

from __future__ import annotations

from typing import Any

from vlkv.processing.arranging import SquareInputs
from vlkv.processing.pixels import KINDS

_WHOLE = dict(size={"height": 384, "width": 384}, do_center_crop=False)
# Image processors of all LLaVAs in transformers.
LLAVA_KINDS: dict[str, dict[str, Any]] = KINDS | {
    "LlavaImageProcessor": {"padding": "square"}, "LlavaNextImageProcessor": {}, "LlavaNextVideoImageProcessor": {},
    "LlavaNextVideoVideoProcessor": {}, "LlavaOnevisionImageProcessor": _WHOLE, "LlavaOnevisionVideoProcessor": _WHOLE,
}  # fmt: skip


class LlavaInputs(SquareInputs):
    """A square of the tower's features, the class token before them if the config keeps it."""

    kinds = LLAVA_KINDS
