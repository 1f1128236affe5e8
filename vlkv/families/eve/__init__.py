"""EVE (Diao et al. 2024, version 1): a patch layer and a Llama decoder, without a vision tower."""

from vlkv.families.eve.config import EveConfig
from vlkv.families.eve.model import Eve
from vlkv.families.eve.weights import names
from vlkv.families.family import Family

FAMILY = Family(config=EveConfig, model=Eve, names=names)
