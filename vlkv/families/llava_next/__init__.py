"""LLaVA-NeXT, NeXT-Video, OneVision and Video: a tower over tiles and frames, a projector, a decoder."""

from vlkv.families.family import Family
from vlkv.families.llava.original import claims_video
from vlkv.families.llava_next.config import LlavaNextConfig, LlavaNextVideoConfig, LlavaOnevisionConfig
from vlkv.families.llava_next.model import LlavaNext
from vlkv.families.llava_next.original import LlavaVideoConfig
from vlkv.families.llava_next.weights import names, original_names

# PUBLISHED has the sizes of these three.
FAMILY = Family(config=LlavaNextConfig, model=LlavaNext, names=names)
VIDEO = Family(config=LlavaNextVideoConfig, model=LlavaNext, names=names)
ONEVISION = Family(config=LlavaOnevisionConfig, model=LlavaNext, names=names)
# LLaVA-Video and OneVision in their authors' form.
ORIGINAL = Family(config=LlavaVideoConfig, model=LlavaNext, names=original_names,
                  claims=claims_video)  # fmt: skip
