"""Qwen2-VL and Qwen2.5-VL: how pictures become frames and positions is decided on the host, in inputs.py."""

from __future__ import annotations

from einops import reduce
from jaxtyping import Array, Float

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel
from vlkv.families.qwen2_vl.tower import Qwen2VlMerger, Qwen2VlTower
from vlkv.inputs import Inputs


class Qwen2Vl(VisionLanguageModel):
    """The tower is told where each patch lies; a merger stands in the place of the projector."""

    tower = Qwen2VlTower

    def make_projector(self, config: ModelConfig, *, init: Initializer) -> None:
        """There is a merger instead."""

    def make_more(self, config: ModelConfig, *, init: Initializer) -> None:
        """The merger."""
        self.merger = Qwen2VlMerger(config.vision, init=init)

    def see(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[Array, list[Array]]:
        """Features of the patches of all frames, and the attention that they received."""
        return self.vision.watch(pixels, inputs.layout["place"], blocks)

    def pool(self, attention: Float[Array, "F n C"], inputs: Inputs) -> Float[Array, "R C"]:
        """Sums over the patches of a token."""
        del inputs
        return reduce(attention, "f (v u) c -> (f v) c", "sum", u=self.config.vision.merge**2)

    def project(self, features: Float[Array, "F n d"], inputs: Inputs) -> Float[Array, "R D"]:
        """Patches of a token joined, then projected."""
        return self.merger(features)
