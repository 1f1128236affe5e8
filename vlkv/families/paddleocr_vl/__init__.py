"""PaddleOCR-VL (Cui et al. 2025): a NaViT-style SigLIP tower at native resolution and an ERNIE-4.5 decoder."""

from vlkv.families.family import Family
from vlkv.families.paddleocr_vl.config import PaddleOcrVlConfig
from vlkv.families.paddleocr_vl.model import PaddleOcrVl
from vlkv.families.paddleocr_vl.weights import names

FAMILY = Family(config=PaddleOcrVlConfig, model=PaddleOcrVl, names=names)
