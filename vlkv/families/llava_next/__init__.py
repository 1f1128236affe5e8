"""LLaVA-NeXT, NeXT-Video, OneVision and Video: a tower over tiles and frames, a projector, a decoder.

inputs.py decides on the host which patches are mixed, and where each embedding is used.
Axes: R vision embeddings of the batch in one list · M mixed ones.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import Family, VisionLanguageModel, flat
from vlkv.families.llava_form import claims_video
from vlkv.families.llava_next.config import (
    LlavaNextConfig,
    LlavaNextVideoConfig,
    LlavaOnevisionConfig,
    LlavaVideoConfig,
)
from vlkv.families.names import stored_names
from vlkv.inputs import Inputs


class LlavaNext(VisionLanguageModel):
    """The attention of a mixed token is the weighted sum over its patches; that of a newline is 0."""

    newline: nnx.Param

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module | None:
        projector = super().make_projector(config, init=init)
        self.newline = init.normal(config.decoder.width, scale=config.decoder.width**-0.5)
        return projector

    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        """Embeddings of the patches, the mixed embeddings, and the newline."""
        patches, video = flat(features), self.config.wiring.video
        if video is not None and video.before_projector:
            vision = self.projector(with_mixed(patches, inputs))
        else:
            vision = with_mixed(self.projector(patches), inputs)
        return jnp.concatenate([vision, self.newline[...][None]])

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        return jnp.pad(with_mixed(flat(attention), inputs), [(0, 1), (0, 0)])


def with_mixed(patches: Float[Array, "R D"], inputs: Inputs) -> Float[Array, "_ D"]:
    """The patches, followed by the mixed embeddings that `inputs.layout` describes."""
    taps: Any = inputs.layout.get("taps")
    if taps is None or not taps.shape[0]:
        return patches
    return jnp.concatenate([patches, mix(patches, taps, inputs.layout["weights"])])


def mix(patches: Float[Array, "R D"], taps: Int[Array, "M k"], weights: Float[Array, "M k"]) -> Float[Array, "M D"]:
    """Weighted sums of patches, computed in float32. One gather per tap avoids an array of size M k D."""
    total = jnp.zeros((taps.shape[0], patches.shape[1]), jnp.float32)
    for k in range(taps.shape[1]):
        total = total + weights[:, k, None] * patches[taps[:, k]].astype(jnp.float32)
    return total.astype(patches.dtype)


FAMILIES = {
    "llava_next": Family(config=LlavaNextConfig, model=LlavaNext, names=stored_names("llava_next")),
    "llava_next_video": Family(config=LlavaNextVideoConfig, model=LlavaNext, names=stored_names("llava_next")),
    "llava_onevision": Family(config=LlavaOnevisionConfig, model=LlavaNext, names=stored_names("llava_next")),
    # LLaVA-Video and OneVision in their authors' form.
    "llava_qwen": Family(
        config=LlavaVideoConfig, model=LlavaNext, names=stored_names("llava_qwen"), claims=claims_video
    ),
}
