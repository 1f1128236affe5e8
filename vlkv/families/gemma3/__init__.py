"""Gemma 3 with images (4B, 12B, 27B): a SigLIP tower, average pooling to 256 tokens, and the decoder of Gemma 3."""

from vlkv.families.family import Family
from vlkv.families.gemma3.config import Gemma3Config
from vlkv.families.gemma3.model import Gemma3
from vlkv.families.gemma3.weights import names

FAMILY = Family(config=Gemma3Config, model=Gemma3, names=names)
