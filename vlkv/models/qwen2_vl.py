"""Qwen2-VL and Qwen2.5-VL: a tower at native resolution, a merger, one decoder. Wiring only."""

from __future__ import annotations

import jax
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import ModelConfig, QwenVisionConfig
from vlkv.decoder import Decoder
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.layers import Initializer, Linear
from vlkv.models.splice import splice
from vlkv.vision.qwen2 import QwenTower, norm


class QwenMerger(nnx.Module):
    """Norm, merge x merge patches side by side, linear, exact (erf) GELU, linear."""

    def __init__(self, c: QwenVisionConfig, *, init: Initializer) -> None:
        width = c.width * c.merge**2
        self.norm = norm(c, init=init)
        self.first = Linear(width, width, bias=True, init=init)
        self.second = Linear(width, c.out_width, bias=True, init=init)
        self.unit = c.merge**2

    def __call__(self, x: Float[Array, "F n i"]) -> Float[Array, "V D"]:
        """Vision embeddings of all frames in one list."""
        x = rearrange(self.norm(x), "f (v u) i -> (f v) (u i)", u=self.unit)
        return self.second(jax.nn.gelu(self.first(x), approximate=False))


class QwenVl(nnx.Module):
    """The whole model; how pictures become frames and positions is the layout's."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert isinstance(config.vision, QwenVisionConfig)
        self.config = config
        self.vision = QwenTower(config.vision, init=init)
        self.merger = QwenMerger(config.vision, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with those of images and videos in their places."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x
        features = self.vision(inputs.pixels.astype(x.dtype), inputs.layout["place"])
        return splice(x, self.merger(features), inputs.vision_index)

    def watch(self, inputs: Inputs, blocks: tuple[int, ...]) -> tuple[Float[Array, "B T D"], None]:
        """The same; refuses to watch, since the tower has no class token."""
        if blocks:
            raise InputError(f"the tower of {self.config.family} has no class token that could rank its tokens")
        return self.embed(inputs), None
