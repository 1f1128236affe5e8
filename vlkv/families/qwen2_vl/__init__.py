"""Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025): native resolution, a patch merger, M-RoPE."""

from vlkv.families.family import Family
from vlkv.families.qwen2_vl.config import Qwen2VlConfig
from vlkv.families.qwen2_vl.model import Qwen2Vl
from vlkv.families.qwen2_vl.weights import names

FAMILY = Family(config=Qwen2VlConfig, model=Qwen2Vl, names=names)
