"""SmolVLM: SigLIP with its last norm, and a projector of one linear map."""

from __future__ import annotations

from flax import nnx
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer, Linear
from vlkv.families.internvl.model import InternVl
from vlkv.towers.vit import NormedVit


class SmolVlm(InternVl):
    """Pixel shuffle as in InternVL, then one linear map without a bias."""

    tower = NormedVit

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        merged = config.vision.width * config.wiring.merge**2
        return Linear(merged, config.decoder.width, bias=False, init=init)
