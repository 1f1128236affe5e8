"""MobileVLM-V2: CLIP tower, a projector that pools, one decoder (Chu et al. 2024). Wiring only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import reduce
from flax import nnx
from jaxtyping import Array, Float

from vlkv.config import ClipConfig, ModelConfig
from vlkv.decoder import Decoder
from vlkv.inputs import Inputs
from vlkv.layers import Initializer, Linear
from vlkv.models.llava import watched
from vlkv.models.splice import splice
from vlkv.vision.clip import ClipTower


class LdpProjector(nnx.Module):
    """LDPv2 (Sec. 3.2): two linear maps, the mean of each window of patches, and where each token lies among the rest.

    The GELU is the exact one (erf); the last part is a depthwise 3 x 3 convolution, added to the token itself.
    """

    def __init__(self, width_in: int, width_out: int, side: int, *, init: Initializer) -> None:
        self.first = Linear(width_in, width_out, bias=True, init=init)
        self.second = Linear(width_out, width_out, bias=True, init=init)
        self.weight = init.normal(width_out, 1, 3, 3, scale=1 / 3)
        self.bias = init.constant(0.0, width_out)
        self.side = side

    def __call__(self, x: Float[Array, "I V C"]) -> Float[Array, "I v D"]:
        """Features of all patches to `side` x `side` tokens of the decoder's width."""
        x = self.pool(self.second(jax.nn.gelu(self.first(x), approximate=False)))
        x = x.reshape(-1, self.side, self.side, x.shape[-1])
        padded, weight = jnp.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)]), self.weight[...][:, 0]
        for line in range(3):
            for column in range(3):
                x = x + padded[:, line : line + self.side, column : column + self.side] * weight[:, line, column]
        return (x + self.bias[...]).reshape(len(x), self.side**2, -1)

    def pool(self, x: Float[Array, "I V C"]) -> Float[Array, "I v C"]:
        """Means over the windows of patches that become one token each."""
        grid = int(x.shape[1] ** 0.5)
        window = grid // self.side
        x = x.reshape(-1, grid, grid, x.shape[-1])
        return reduce(x, "i (y a) (x b) c -> i (y x) c", "mean", a=window, b=window)


class MobileVlm(nnx.Module):
    """The whole model; `embed` is all that differs from a text model."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert isinstance(config.vision, ClipConfig)
        self.config = config
        self.vision = ClipTower(config.vision, init=init)
        self.projector = LdpProjector(config.vision.width, config.decoder.width, config.wiring.side, init=init)
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with the images' embeddings in their places."""
        return self.watch(inputs, ())[0]

    def watch(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        """The same, with what the tower's class token gave in some of its blocks to the patches of a token (mean)."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x, None
        features, rows = self.vision.watch(inputs.pixels.astype(x.dtype), blocks)
        features = self.projector(features)
        x = splice(x, features.reshape(-1, features.shape[-1]), inputs.vision_index)
        pooled = [jnp.swapaxes(self.projector.pool(jnp.swapaxes(row, 1, 2)), 1, 2) for row in rows]
        return x, watched(pooled, inputs.vision_index) if blocks else None
