"""Qwen3-VL (Bai et al. 2025): Qwen2-VL's form with DeepStack, interleaved M-RoPE and a Qwen3 or Qwen3-MoE decoder."""

from vlkv.families.family import Family
from vlkv.families.qwen3_vl.config import Qwen3VlConfig
from vlkv.families.qwen3_vl.model import Qwen3Vl
from vlkv.families.qwen3_vl.weights import names

FAMILY = Family(config=Qwen3VlConfig, model=Qwen3Vl, names=names)
