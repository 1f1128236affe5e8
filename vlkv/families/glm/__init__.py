"""GLM-4.1V and GLM-4.6V-Flash (GLM-V Team 2025, arXiv:2507.01006), and GLM-OCR (2026)."""

from vlkv.families.family import Family
from vlkv.families.glm.config import GlmConfig, has_experts
from vlkv.families.glm.model import Glm
from vlkv.families.glm.weights import names

FAMILY = Family(config=GlmConfig, model=Glm, names=names, claims=has_experts)
