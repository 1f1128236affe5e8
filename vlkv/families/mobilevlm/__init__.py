"""MobileVLM-V2 (Chu et al. 2024): a CLIP tower, a projector that pools patches, a Llama decoder."""

from vlkv.families.family import Family
from vlkv.families.llava.original import complete
from vlkv.families.mobilevlm.config import MobileVlmConfig
from vlkv.families.mobilevlm.model import MobileVlm
from vlkv.families.mobilevlm.weights import names

FAMILY = Family(config=MobileVlmConfig, model=MobileVlm, names=names, complete=complete)
