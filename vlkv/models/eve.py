"""EVE: a patch layer, a two-layer projector, one decoder (Diao et al. 2024). Wiring only."""

from __future__ import annotations

from typing import NoReturn

from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import EveVisionConfig, ModelConfig
from vlkv.decoder import Decoder
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.layers import Initializer
from vlkv.models.llava import LlavaProjector
from vlkv.models.splice import splice
from vlkv.vision.eve import EvePatches


class Eve(nnx.Module):
    """The whole model; `embed` is all that differs from a text model."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert isinstance(config.vision, EveVisionConfig)
        self.config = config
        self.vision = EvePatches(config.vision, init=init)
        self.projector = LlavaProjector(config.vision.width, config.decoder.width, bias=True, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with the images' embeddings in their places."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x
        features = self.vision(inputs.pixels.astype(x.dtype), inputs.layout["member"])
        return splice(x, self.projector(features), inputs.vision_index)

    def watch(self, inputs: Inputs, blocks: tuple[int, ...]) -> NoReturn:
        """Refuses: there are no blocks to watch."""
        del inputs, blocks
        raise InputError("EVE has no vision tower whose class token could rank its vision tokens")
