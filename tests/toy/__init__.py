"""A family that is added as docs/architecture.md describes: a folder, and one line in `vlkv.families.FAMILIES`."""

from tests.toy.config import PUBLISHED, ToyConfig
from tests.toy.weights import names
from vlkv.families.family import Family, VisionLanguageModel
from vlkv.towers.vit import Vit


class Toy(VisionLanguageModel):
    tower = Vit


FAMILY = Family(config=ToyConfig, model=Toy, names=names, published=PUBLISHED)
