"""LLaVA-1.5 (Liu et al. 2023): a CLIP tower, a two-layer projector, a Llama or Mistral decoder."""

from vlkv.families.family import Family, VisionLanguageModel
from vlkv.families.llava.config import LlavaConfig
from vlkv.families.llava.original import LlavaOriginalConfig, claims, complete, original_names
from vlkv.families.llava.weights import names

FAMILY = Family(config=LlavaConfig, model=VisionLanguageModel, names=names)
# In its authors' form.
ORIGINAL = Family(config=LlavaOriginalConfig, model=VisionLanguageModel, names=original_names, complete=complete,
                  claims=claims)  # fmt: skip
