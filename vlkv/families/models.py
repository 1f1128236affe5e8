"""Models of several families: the tower has native resolution, or its patches are shuffled into tokens.

Axes: as in `family.py`; F pictures · n patches of a picture · d width of the tower.
"""

from __future__ import annotations

from collections.abc import Callable

from einops import rearrange, reduce
from flax import nnx
from jaxtyping import Array, Float
from typing_extensions import override

from vlkv.config import ModelConfig
from vlkv.decoder.layers import Initializer
from vlkv.families.family import VisionLanguageModel
from vlkv.inputs import Inputs
from vlkv.towers.native import NativeTower, PatchMerger


class NativeModel(VisionLanguageModel):
    """The tower gets the position of each patch. The projector merges the patches of a token.

    The outputs of the blocks `deep` of the tower's config are merged too, each by its own merger. They are added after
    the decoder's first layers (DeepStack).
    """

    tower: Callable[..., nnx.Module] = NativeTower

    def __init__(self, config: ModelConfig, *, init: Initializer) -> None:
        super().__init__(config, init=init)
        c = config.vision
        self.deep = nnx.data(tuple(PatchMerger(c, norms_tokens=True, init=init) for _ in c.deep))

    @override
    def make_projector(self, config: ModelConfig, *, init: Initializer) -> nnx.Module:
        return PatchMerger(config.vision, init=init)

    @override
    def run_tower(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[list[Array], list[Array]]:
        return self.vision.with_attention(pixels, inputs.layout["place"], blocks)

    @override
    def project(self, features: list[Float[Array, "F n d"]], inputs: Inputs) -> Float[Array, "R D"]:
        return super().project(features[-1], inputs)

    @override
    def project_added(self, features: list[Float[Array, "F n d"]]) -> tuple[Float[Array, "R D"], ...]:
        return tuple(merge(x) for merge, x in zip(self.deep, features[:-1], strict=True))

    def pool(self, attention: Float[Array, "F n C"], inputs: Inputs) -> Float[Array, "R C"]:
        """The attention of a token is the sum over its patches."""
        return reduce(attention, "f (v u) c -> (f v) c", "sum", u=self.config.vision.merge**2)


class ShuffledModel(VisionLanguageModel):
    """Each vision token is merge x merge neighbouring patches, so its attention is the sum over them."""

    @override
    def project(self, features: Float[Array, "I V d"], inputs: Inputs) -> Float[Array, "R D"]:
        return self.projector(rearrange(features, "i (y a x b) d -> (i y x) (a b d)", **self._sides))

    @override
    def pool(self, attention: Float[Array, "I V C"], inputs: Inputs) -> Float[Array, "R C"]:
        return reduce(attention, "i (y a x b) c -> (i y x) c", "sum", **self._sides)

    @property
    def _sides(self) -> dict[str, int]:
        # Lengths of the axes in the patterns above: y x x tokens, each of a x b patches.
        merge = self.config.wiring.merge
        return {"y": self.config.vision.grid // merge, "a": merge, "x": self.config.vision.grid // merge, "b": merge}
