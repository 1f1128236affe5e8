"""Qwen-VL: the tower's features already have the decoder's width."""

from __future__ import annotations

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel
from vlkv.families.qwen_vl.tower import QwenVlTower


class QwenVl(VisionLanguageModel):
    """A tower with a resampler, and a decoder; no projector."""

    tower = QwenVlTower

    def make_projector(self, config: ModelConfig, *, init: Initializer) -> None:
        """No projector."""
