"""Qwen2-VL and its successors. inputs.py decides on the host how pictures become frames, patches and positions."""

from __future__ import annotations

from collections.abc import Callable

from einops import reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel
from vlkv.families.qwen2_vl.tower import Qwen2VlMerger, Qwen2VlTower
from vlkv.inputs import Inputs


class Qwen2Vl(VisionLanguageModel):
    """The tower gets the position of each patch. The projector merges the patches of a token.

    The outputs of the tower's blocks `deep` are merged too, each with a merger of its own.
    """

    tower: Callable[..., nnx.Module] = Qwen2VlTower

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        super().__init__(config, init=init)
        c = config.vision
        self.deep = nnx.data(tuple(Qwen2VlMerger(c, norms_tokens=True, init=init) for _ in c.deep))

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return Qwen2VlMerger(config.vision, init=init)

    @override
    def run_tower(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
        return self.vision.with_attention(pixels, inputs.layout["place"], blocks)

    @override
    def project(self, features: list[Float[Array, "F n d"]], inputs: Inputs) -> Float[Array, "R D"]:
        return super().project(features[-1], inputs)

    @override
    def project_added(self, features: list[Float[Array, "F n d"]]) -> tuple[Float[Array, "R D"], ...]:
        return tuple(merge(x) for merge, x in zip(self.deep, features[:-1], strict=True))

    def pool(self, attention: Float[Array, "F n C"], inputs: Inputs) -> Float[Array, "R C"]:
        """The attention of a token is the sum over its patches."""
        return reduce(attention, "f (v u) c -> (f v) c", "sum", u=self.config.vision.merge**2)
