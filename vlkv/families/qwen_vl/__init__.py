"""Qwen-VL (Bai et al. 2023): a ViT, a resampler from its patches to a square of tokens, and a Qwen 1 decoder."""

from vlkv.families.family import Family
from vlkv.families.qwen_vl.config import SPECIAL, QwenVlConfig
from vlkv.families.qwen_vl.model import QwenVl
from vlkv.families.qwen_vl.weights import names

FAMILY = Family(config=QwenVlConfig, model=QwenVl, names=names, special=SPECIAL)
