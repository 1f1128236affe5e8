"""Qwen-VL: the tower itself makes tokens of the decoder's width."""

from __future__ import annotations

from jaxtyping import Array, Float

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel, flat
from vlkv.families.qwen_vl.tower import QwenVlTower
from vlkv.inputs import Inputs


class QwenVl(VisionLanguageModel):
    """No projector."""

    tower = QwenVlTower

    def make_projector(self, config: ModelConfig, *, init: Initializer) -> None:
        """There is none."""

    def project(self, features: Float[Array, "I v D"], inputs: Inputs) -> Float[Array, "R D"]:
        """The features as they are."""
        return flat(features)
