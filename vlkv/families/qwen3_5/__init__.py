"""Qwen3.5 and 3.6: the tower of Qwen3-VL without DeepStack, and a decoder of which most layers are recurrent."""

from vlkv.families.family import Family
from vlkv.families.qwen3_5.config import Qwen35Config
from vlkv.families.qwen3_5.weights import names
from vlkv.families.qwen3_vl.model import Qwen3Vl

FAMILY = Family(config=Qwen35Config, model=Qwen3Vl, names=names)
