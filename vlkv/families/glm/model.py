"""GLM-4.1V, GLM-4.6V-Flash and GLM-OCR: the model of Qwen2-VL with another tower and merger."""

from __future__ import annotations

from flax import nnx
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.glm.tower import GlmMerger, GlmTower
from vlkv.families.qwen2_vl.model import Qwen2Vl


class Glm(Qwen2Vl):
    """The projector makes a token of merge x merge patches."""

    tower = GlmTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return GlmMerger(config.vision, init=init)
