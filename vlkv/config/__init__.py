"""What a model is: frozen, hashable configs read from a Hugging Face `config.json`.

A field that changes the answer and that we do not honour is refused by name; nothing is silently ignored.
"""

from vlkv.config.anyres import AnyRes
from vlkv.config.clip import ClipConfig
from vlkv.config.decoder import TEXT_FAMILIES, DecoderConfig
from vlkv.config.eve import EveVisionConfig
from vlkv.config.internvit import InternVitConfig
from vlkv.config.model import FAMILIES, ModelConfig
from vlkv.config.qwen2_vision import QwenVisionConfig
from vlkv.config.qwen_vl import QwenVitConfig
from vlkv.config.rope import RopeConfig
from vlkv.config.siglip import SiglipConfig

__all__ = [
    "FAMILIES", "TEXT_FAMILIES", "AnyRes", "ClipConfig", "DecoderConfig", "EveVisionConfig", "InternVitConfig",
    "ModelConfig", "QwenVisionConfig", "QwenVitConfig", "RopeConfig", "SiglipConfig",
]  # fmt: skip
