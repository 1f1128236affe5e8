"""InternVL (Chen et al. 2024): an InternViT tower over tiles, pixel shuffle, a two-layer projector, any decoder."""

from vlkv.families.family import Family
from vlkv.families.internvl.config import InternVlConfig
from vlkv.families.internvl.model import InternVl
from vlkv.families.internvl.original import InternVlChatConfig
from vlkv.families.internvl.weights import names, original_names

FAMILY = Family(config=InternVlConfig, model=InternVl, names=names)
# InternVL-Chat-V1.5 and InternVL2 to InternVL3.5 in their authors' form (`internvl_chat`).
ORIGINAL = Family(config=InternVlChatConfig, model=InternVl, names=original_names)
