"""LLaVA-1.5: CLIP tower, a two-layer projector, one decoder (Liu et al. 2023). Wiring only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from vlkv.config import ClipConfig, ModelConfig
from vlkv.decoder import Decoder
from vlkv.inputs import Inputs
from vlkv.layers import Initializer, Linear
from vlkv.models.splice import splice
from vlkv.vision.clip import ClipTower


class LlavaProjector(nnx.Module):
    """Linear, exact (erf) GELU, linear."""

    def __init__(self, width_in: int, width_out: int, *, bias: bool, init: Initializer) -> None:
        self.first = Linear(width_in, width_out, bias=bias, init=init)
        self.second = Linear(width_out, width_out, bias=bias, init=init)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch D"]:
        """Vision features to the decoder's width."""
        return self.second(jax.nn.gelu(self.first(x), approximate=False))


class Llava(nnx.Module):
    """The whole model; `embed` is all that differs from a text model."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert isinstance(config.vision, ClipConfig)
        self.config = config
        self.vision = ClipTower(config.vision, init=init)
        self.projector = LlavaProjector(
            config.vision.width, config.decoder.width, bias=config.projector_bias, init=init
        )
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with the images' embeddings in their places."""
        return self.watch(inputs, ())[0]

    def watch(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        """The same, with what the tower's class token gave to each vision token in some of its blocks."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x, None
        features, rows = self.vision.watch(inputs.pixels.astype(x.dtype), blocks)
        features = self.projector(features)
        x = splice(x, features.reshape(-1, features.shape[-1]), inputs.vision_index)
        return x, watched(rows, inputs.vision_index) if blocks else None


def watched(rows: list[Float[Array, "I N V"]], vision_index: Int[Array, "B T"]) -> Float[Array, "B W N T"]:
    """What the class token gave, W times, to the token at each place; 0 for text."""
    attention = jnp.stack(rows).transpose(1, 3, 0, 2)  # [I, V, W, N]
    attention = attention.reshape(-1, *attention.shape[2:])[jnp.maximum(vision_index, 0)]
    return jnp.where(vision_index[..., None, None] >= 0, attention, 0.0).transpose(0, 2, 3, 1)
