"""LLaVA-1.5 (Liu et al. 2023): a CLIP tower, a two-layer projector, a Llama or Mistral decoder."""

from vlkv.families.family import Family, VisionLanguageModel
from vlkv.families.llava.config import PUBLISHED, LlavaConfig
from vlkv.families.llava.original import LlavaOriginalConfig, claims, complete, original_names
from vlkv.families.llava.weights import names
from vlkv.towers.vit import Vit


class Llava(VisionLanguageModel):
    """Every feature of the tower becomes one vision token."""

    tower = Vit


FAMILY = Family(config=LlavaConfig, model=Llava, names=names, published=PUBLISHED)
# In its authors' form.
ORIGINAL = Family(config=LlavaOriginalConfig, model=Llava, names=original_names, complete=complete, claims=claims)
