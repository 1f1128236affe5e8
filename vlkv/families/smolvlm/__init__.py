"""SmolVLM, SmolVLM2 and Idefics3: a SigLIP tower over tiles, pixel shuffle, one linear map, a Llama decoder."""

from vlkv.families.family import Family
from vlkv.families.smolvlm.config import SmolVlmConfig
from vlkv.families.smolvlm.model import SmolVlm
from vlkv.families.smolvlm.weights import names

FAMILY = Family(config=SmolVlmConfig, model=SmolVlm, names=names)
