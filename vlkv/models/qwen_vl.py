"""Qwen-VL: a ViT with a resampler, one decoder (Bai et al. 2023). Wiring only."""

from __future__ import annotations

from typing import NoReturn

from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import ModelConfig, QwenVitConfig
from vlkv.decoder import Decoder
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.layers import Initializer
from vlkv.models.splice import splice
from vlkv.vision.qwen import QwenVit


class FirstQwenVl(nnx.Module):
    """The whole model; `embed` is all that differs from a text model."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert isinstance(config.vision, QwenVitConfig)
        self.config = config
        self.vision = QwenVit(config.vision, config.decoder.width, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with the images' embeddings in their places."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x
        features = self.vision(inputs.pixels.astype(x.dtype))
        return splice(x, features.reshape(-1, features.shape[-1]), inputs.vision_index)

    def watch(self, inputs: Inputs, blocks: tuple[int, ...]) -> NoReturn:
        """Refuses: the tower has no class token."""
        del inputs, blocks
        raise InputError("Qwen-VL's tower has no class token that could rank its vision tokens")
