"""Gemma 3: windows of patches are averaged, normalised and projected."""

from __future__ import annotations

from einops import reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, RMSNorm
from vlkv.families.family import VisionLanguageModel
from vlkv.inputs import Inputs
from vlkv.towers.vit import NormedVit


class Gemma3Projector(nnx.Module):
    """RMSNorm with 1 + weight, and a product with a matrix that checkpoints have in the order [in, out]."""

    def __init__(self, width_in: int, width_out: int, eps: float, *, init: Initializer) -> None:
        self.norm = RMSNorm(width_in, eps, offset=1.0, init=init)
        self.matrix = init.normal(width_in, width_out, scale=width_in**-0.5)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch D"]:
        """Maps the last axis."""
        return self.norm(x) @ self.matrix[...]


class Gemma3(VisionLanguageModel):
    """Each vision token is the mean of a square window of patches, and so is its attention."""

    tower = NormedVit

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return Gemma3Projector(config.vision.width, config.decoder.width, config.vision.norm_eps, init=init)

    @override
    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        return self.projector(self.pool(features, inputs))

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        side = self.config.wiring.side
        window = self.config.vision.grid // side
        return reduce(attention, "i (y a x b) c -> (i y x) c", "mean", y=side, a=window, x=side, b=window)
