"""InternVL: pixel shuffle between tower and projector."""

from __future__ import annotations

from einops import rearrange, reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, LayerNorm, Mlp
from vlkv.families.family import VisionLanguageModel
from vlkv.inputs import Inputs


class InternVlProjector(Mlp):
    """LayerNorm, linear, exact (erf) GELU, linear."""

    def __init__(self, width_in: int, width_out: int, *, init: Initializer) -> None:
        self.norm = LayerNorm(width_in, 1e-5, init=init)
        super().__init__(width_in, width_out, width_out, init=init)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch D"]:
        """Projects merged patches to the decoder's width."""
        return super().__call__(self.norm(x))


class InternVl(VisionLanguageModel):
    """Each vision token is merge x merge neighbouring patches, so its attention is the sum over them."""

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return InternVlProjector(config.vision.width * config.wiring.merge**2, config.decoder.width, init=init)

    @override
    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        return self.projector(rearrange(features, "i (y a x b) d -> (i y x) (a b d)", **self._sides))

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        return reduce(attention, "i (y a x b) c -> (i y x) c", "sum", **self._sides)

    @property
    def _sides(self) -> dict[str, int]:
        merge = self.config.wiring.merge
        return {"y": self.config.vision.grid // merge, "a": merge, "x": self.config.vision.grid // merge, "b": merge}
