"""PaddleOCR-VL: the model of Qwen2-VL with another tower."""

from __future__ import annotations

import dataclasses

from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.paddleocr_vl.tower import PaddleOcrVlTower
from vlkv.families.qwen2_vl.model import Qwen2Vl
from vlkv.families.qwen2_vl.tower import Qwen2VlMerger


class PaddleOcrVl(Qwen2Vl):
    """Its tower has no outputs for DeepStack; the merger's norm has an epsilon of its own."""

    tower = PaddleOcrVlTower

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> Qwen2VlMerger:
        return Qwen2VlMerger(dataclasses.replace(config.vision, norm_eps=1e-5), init=init)
