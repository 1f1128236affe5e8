"""Gemma 4 with images (E2B, E4B, 26B-A4B, 31B): a tower at native resolution, and the decoder of Gemma 4."""

from vlkv.families.family import Family
from vlkv.families.gemma4.config import Gemma4Config
from vlkv.families.gemma4.model import Gemma4
from vlkv.families.gemma4.weights import names

FAMILY = Family(config=Gemma4Config, model=Gemma4, names=names)
