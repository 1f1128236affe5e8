"""MobileVLM-V2: a projector that pools patches."""

from __future__ import annotations

import jax.numpy as jnp
from einops import reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, Mlp
from vlkv.families.family import VisionLanguageModel, flat
from vlkv.families.mobilevlm.config import SIDE
from vlkv.inputs import Inputs


class LdpProjector(Mlp):
    """LDPv2 (Sec. 3.2): two linear maps, mean pooling, and a depthwise 3 x 3 convolution with a residual."""

    def __init__(self, width_in: int, width_out: int, *, init: Initializer) -> None:
        super().__init__(width_in, width_out, width_out, init=init)
        self.weight = init.normal(width_out, 1, 3, 3, scale=1 / 3)
        self.bias = init.constant(0.0, width_out)

    def __call__(self, x: Float[Array, "I V C"]) -> Float[Array, "I v D"]:
        """Maps the features of all patches to SIDE x SIDE tokens of the decoder's width."""
        x = pool(super().__call__(x))
        x = x.reshape(-1, SIDE, SIDE, x.shape[-1])
        padded, weight = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), self.weight[...][:, 0]
        for line in range(3):
            for column in range(3):
                x = x + padded[:, line : line + SIDE, column : column + SIDE] * weight[:, line, column]
        return (x + self.bias[...]).reshape(len(x), SIDE**2, -1)


class MobileVlm(VisionLanguageModel):
    """Each vision token is the mean of a window of patches."""

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return LdpProjector(config.vision.width, config.decoder.width, init=init)

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        return flat(pool(attention))


def pool(x: Float[Array, "I V C"]) -> Float[Array, "I v C"]:
    """Mean pooling of a square of patches to SIDE x SIDE tokens."""
    grid = round(x.shape[1] ** 0.5)
    x = x.reshape(-1, grid, grid, x.shape[-1])
    return reduce(x, "i (y a) (x b) c -> i (y x) c", "mean", a=grid // SIDE, b=grid // SIDE)
