"""A family that is added as docs/architecture.md describes: a folder, and one line in `vlkv.families.FAMILIES`."""

from tests.toy.config import ToyConfig
from tests.toy.weights import names
from vlkv.families.family import Family, VisionLanguageModel

FAMILY = Family(config=ToyConfig, model=VisionLanguageModel, names=names)
