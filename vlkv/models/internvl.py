"""InternVL: InternViT over tiles, a pixel shuffle, a two-layer projector, one decoder (Chen et al. 2024). Wiring only.

Axes: I tiles · V vision tokens · N heads of the tower · B batch · T tokens · W watched blocks · D width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange, reduce
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import InternVitConfig, ModelConfig
from vlkv.decoder import Decoder
from vlkv.inputs import Inputs
from vlkv.layers import Initializer, LayerNorm, Linear
from vlkv.models.splice import splice
from vlkv.vision.intern import InternVitTower


class InternVlProjector(nnx.Module):
    """LayerNorm, linear, exact (erf) GELU, linear."""

    def __init__(self, width_in: int, width_out: int, *, init: Initializer) -> None:
        self.norm = LayerNorm(width_in, 1e-5, init=init)
        self.first = Linear(width_in, width_out, bias=True, init=init)
        self.second = Linear(width_out, width_out, bias=True, init=init)

    def __call__(self, x: Float[Array, "*batch i"]) -> Float[Array, "*batch D"]:
        """Merged patches to the decoder's width."""
        return self.second(jax.nn.gelu(self.first(self.norm(x)), approximate=False))


class InternVl(nnx.Module):
    """The whole model; `embed` is all that differs from a text model."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert isinstance(config.vision, InternVitConfig)
        self.config = config
        self.vision = InternVitTower(config.vision, init=init)
        width = config.vision.width * config.wiring.merge**2
        self.projector = InternVlProjector(width, config.decoder.width, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with the tiles' embeddings in their places."""
        return self.watch(inputs, ())[0]

    def watch(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        """The same, with what the tower's class token gave to each vision token: to all of its patches together."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x, None
        features, rows = self.vision.watch(inputs.pixels.astype(x.dtype), blocks)
        sides = {"y": self.vision.config.grid // self.config.wiring.merge, "a": self.config.wiring.merge}
        sides |= {"x": sides["y"], "b": sides["a"]}
        features = self.projector(rearrange(features, "i (y a x b) d -> (i y x) (a b d)", **sides))
        x = splice(x, features, inputs.vision_index)
        if not blocks:
            return x, None
        attention = reduce(jnp.stack(rows), "w i n (y a x b) -> (i y x) w n", "sum", **sides)
        attention = attention[jnp.maximum(inputs.vision_index, 0)]
        return x, jnp.where(inputs.vision_index[..., None, None] >= 0, attention, 0.0).transpose(0, 2, 3, 1)
