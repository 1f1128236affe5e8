"""PaddleOCR-VL: the model of Qwen2-VL with another tower and projector."""

from __future__ import annotations

from einops import rearrange
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, LayerNorm, Mlp
from vlkv.families.paddleocr_vl.tower import PaddleOcrVlTower, PaddleOcrVlVisionConfig
from vlkv.families.qwen2_vl.model import Qwen2Vl


class PaddleOcrVlProjector(Mlp):
    """LayerNorm, concatenation of the merge x merge patches of a token, linear, exact (erf) GELU, linear."""

    def __init__(self, c: PaddleOcrVlVisionConfig, *, init: Initializer) -> None:
        self.unit = c.merge**2
        self.norm = LayerNorm(c.width, 1e-5, init=init)
        super().__init__(c.width * self.unit, c.width * self.unit, c.out_width, init=init)

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V D"]:
        """The vision embeddings of all images in one list."""
        return super().__call__(rearrange(self.norm(x), "f (v u) i -> (f v) (u i)", u=self.unit))


class PaddleOcrVl(Qwen2Vl):
    """Its tower has no outputs for DeepStack."""

    tower = PaddleOcrVlTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> PaddleOcrVlProjector:
        return PaddleOcrVlProjector(config.vision, init=init)
