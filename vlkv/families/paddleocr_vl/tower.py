"""The tower of PaddleOCR-VL: SigLIP with 2-D RoPE, a norm at the end, and positions interpolated from a square table.

Axes: F frames, which are images here · n patches of a frame with padding · C values of a patch · D width.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.decoder.layers import Initializer
from vlkv.families.qwen3_vl.tower import Qwen3VisionConfig, Qwen3VlTower


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddleOcrVlVisionConfig(Qwen3VisionConfig):
    """A tower whose positions are interpolated as in `torch.nn.functional.interpolate(align_corners=False)`."""

    norm_eps: float = dataclasses.field()

    by_line = True
    aligned = False


class PaddleOcrVlTower(Qwen3VlTower):
    """Patch embedding, positions, blocks, and the last norm."""

    def __init__(self, c: PaddleOcrVlVisionConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.norm = c.make_norm(init=init)

    @override
    def with_attention(
        self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"], blocks: tuple[int, ...]
    ) -> tuple[list[Float[Array, "F n D"]], list[Float[Array, "F N n"]]]:
        features, attention = super().with_attention(pixels, place, blocks)
        return [self.norm(x) for x in features], attention
