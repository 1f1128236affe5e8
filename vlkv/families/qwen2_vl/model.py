"""Qwen2-VL and Qwen2.5-VL. inputs.py decides on the host how pictures become frames, patches and positions."""

from __future__ import annotations

from einops import reduce
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel
from vlkv.families.qwen2_vl.tower import Qwen2VlMerger, Qwen2VlTower
from vlkv.inputs import Inputs


class Qwen2Vl(VisionLanguageModel):
    """The tower gets the position of each patch. The projector merges the patches of a token."""

    tower = Qwen2VlTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> Qwen2VlMerger:
        return Qwen2VlMerger(config.vision, init=init)

    @override
    def run_tower(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[Array, list[Array]]:
        return self.vision.with_attention(pixels, inputs.layout["place"], blocks)

    def pool(self, attention: Float[Array, "F n C"], inputs: Inputs) -> Float[Array, "R C"]:
        """The attention of a token is the sum over its patches."""
        del inputs
        return reduce(attention, "f (v u) c -> (f v) c", "sum", u=self.config.vision.merge**2)
