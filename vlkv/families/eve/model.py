"""EVE: a patch layer instead of a tower. It takes the windows of all images as one list."""

from __future__ import annotations

from jaxtyping import Array
from typing_extensions import override

from vlkv.families.eve.patches import EvePatches
from vlkv.families.family import VisionLanguageModel
from vlkv.inputs import Inputs


class Eve(VisionLanguageModel):
    """EVE's patch layer, a projector and a decoder."""

    tower = EvePatches

    @override
    def run_tower(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[Array, list[Array]]:
        # The patch layer has only one block, so every entry of `blocks` means that block.
        features, attention = self.vision(pixels, inputs.layout["member"])
        return features, [attention[None] for _ in blocks]
