"""SmolVLM: SigLIP with its last norm, and a projector of one linear map."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, Linear
from vlkv.families.internvl.model import InternVl
from vlkv.families.smolvlm.config import SmolVlmVisionConfig
from vlkv.towers.vit import Vit


class SmolVlmTower(Vit):
    """A ViT whose features are normalised."""

    def __init__(self, c: SmolVlmVisionConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.last_norm = c.make_norm(init=init)

    @override
    def with_attention(
        self, pixels: Float[Array, "I 3 h w"], blocks: tuple[int, ...]
    ) -> tuple[Float[Array, "I V D"], list[Float[Array, "I N V"]]]:
        features, received = super().with_attention(pixels, blocks)
        return self.last_norm(features), received


class SmolVlm(InternVl):
    """Pixel shuffle as in InternVL, then one linear map without a bias."""

    tower = SmolVlmTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        merged = config.vision.width * config.wiring.merge**2
        return Linear(merged, config.decoder.width, bias=False, init=init)
