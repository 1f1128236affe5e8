"""LLaVA-NeXT, OneVision and Video: a tower over tiles and frames, a projector, one decoder. Wiring only.

What is where, and which patches are mixed into one, is decided on the host: see vlkv/layouts/llava_next.py.
Axes: B batch · T tokens · R flat vision embeddings · M mixed ones · W blocks · N heads of the tower.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from vlkv.config import ClipConfig, ModelConfig, SiglipConfig
from vlkv.decoder import Decoder
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.layers import Initializer
from vlkv.models.llava import LlavaProjector
from vlkv.models.splice import splice
from vlkv.vision.clip import ClipTower
from vlkv.vision.siglip import SiglipTower

_TOWERS: dict[type, Callable[..., ClipTower | SiglipTower]] = {ClipConfig: ClipTower, SiglipConfig: SiglipTower}


class LlavaNext(nnx.Module):
    """The whole model; `embed` is all that differs from a text model."""

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        assert config.vision is not None
        self.config = config
        self.vision = _TOWERS[type(config.vision)](config.vision, init=init)
        self.projector = LlavaProjector(
            config.vision.width, config.decoder.width, bias=config.projector_bias, init=init
        )
        self.newline = init.normal(config.decoder.width, scale=config.decoder.width**-0.5)
        self.decoder = Decoder(config.decoder, init=init)

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        """Token embeddings with the pictures' embeddings in their places."""
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x
        return self._place(x, self.vision(inputs.pixels.astype(x.dtype)), inputs)

    def watch(
        self, inputs: Inputs, blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B W N T"] | None]:
        """The same, with what the tower's class token gave to each vision token in some of its blocks.

        A mixed token gets the weighted sum of what its patches got, a newline nothing.
        """
        if not isinstance(self.vision, ClipTower):
            raise InputError(f"the vision tower of {self.config.family} has no class token to rank its tokens by")
        x = self.decoder.embedding(inputs.tokens)
        if inputs.pixels is None:
            return x, None
        features, rows = self.vision.watch(inputs.pixels.astype(x.dtype), blocks)
        x = self._place(x, features, inputs)
        if not blocks:
            return x, None
        attention = jnp.stack(rows).transpose(1, 3, 0, 2)  # [I, V, W, N]
        kinds = attention.shape[2:]
        attention = with_mixed(attention.reshape(-1, kinds[0] * kinds[1]), inputs)
        attention = jnp.pad(attention, [(0, 1), (0, 0)])[jnp.maximum(inputs.vision_index, 0)]
        attention = jnp.where(inputs.vision_index[..., None] >= 0, attention, 0.0)
        return x, attention.reshape(*x.shape[:2], *kinds).transpose(0, 2, 3, 1)

    def _place(
        self, x: Float[Array, "B T D"], features: Float[Array, "I V d"], inputs: Inputs
    ) -> Float[Array, "B T D"]:
        patches = features.reshape(-1, features.shape[-1])
        video = self.config.wiring.video
        if video is not None and video.before_projector:
            vision = self.projector(with_mixed(patches, inputs))
        else:
            vision = with_mixed(self.projector(patches), inputs)
        return splice(x, jnp.concatenate([vision, self.newline[...][None]]), inputs.vision_index)


def with_mixed(patches: Float[Array, "R D"], inputs: Inputs) -> Float[Array, "_ D"]:
    """The patches, and behind them the weighted sums of some that the layout asks for."""
    taps = inputs.layout.get("taps")
    if taps is None or not taps.shape[0]:
        return patches
    return jnp.concatenate([patches, mix(patches, taps, inputs.layout["weights"])])


def mix(patches: Float[Array, "R D"], taps: Int[Array, "M k"], weights: Float[Array, "M k"]) -> Float[Array, "M D"]:
    """Weighted sums of rows, in float32; one gather per tap, so that nothing of size M k D is made."""
    total = jnp.zeros((taps.shape[0], patches.shape[1]), jnp.float32)
    for k in range(taps.shape[1]):
        total = total + weights[:, k, None] * patches[taps[:, k]].astype(jnp.float32)
    return total.astype(patches.dtype)
