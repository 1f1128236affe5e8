"""LLaVA-NeXT, OneVision and Video: embeddings that are mixed from several patches, and a newline behind all of them.

What is where, and which patches are mixed into one, is decided on the host: see inputs.py.
Axes: R flat vision embeddings · M mixed ones.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel, flat
from vlkv.inputs import Inputs
from vlkv.towers.vit import Vit


class LlavaNext(VisionLanguageModel):
    """A mixed token gets the weighted sum of what the tower's class token gave to its patches, a newline nothing."""

    tower = Vit
    newline: nnx.Param

    def make_more(self, config: ModelConfig, *, init: Initializer) -> None:
        """The newline."""
        self.newline = init.normal(config.decoder.width, scale=config.decoder.width**-0.5)

    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        """Patches, mixed ones, the newline."""
        patches, video = flat(features), self.config.wiring.video
        if video is not None and video.before_projector:
            vision = self.projector(with_mixed(patches, inputs))
        else:
            vision = with_mixed(self.projector(patches), inputs)
        return jnp.concatenate([vision, self.newline[...][None]])

    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        """The same of what was given to each."""
        return jnp.pad(with_mixed(flat(attention), inputs), [(0, 1), (0, 0)])


def with_mixed(patches: Float[Array, "R D"], inputs: Inputs) -> Float[Array, "_ D"]:
    """The patches, and behind them the weighted sums of some that the layout asks for."""
    taps: Any = inputs.layout.get("taps")
    if taps is None or not taps.shape[0]:
        return patches
    return jnp.concatenate([patches, mix(patches, taps, inputs.layout["weights"])])


def mix(patches: Float[Array, "R D"], taps: Int[Array, "M k"], weights: Float[Array, "M k"]) -> Float[Array, "M D"]:
    """Weighted sums of rows, in float32; one gather per tap, so that nothing of size M k D is made."""
    total = jnp.zeros((taps.shape[0], patches.shape[1]), jnp.float32)
    for k in range(taps.shape[1]):
        total = total + weights[:, k, None] * patches[taps[:, k]].astype(jnp.float32)
    return total.astype(patches.dtype)
