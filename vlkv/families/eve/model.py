"""EVE: windows of all pictures in one list, and which picture each belongs to."""

from __future__ import annotations

from jaxtyping import Array, Float

from vlkv.families.eve.patches import EvePatches
from vlkv.families.family import VisionLanguageModel
from vlkv.inputs import Inputs


class Eve(VisionLanguageModel):
    """The patch layer stands in the place of a tower."""

    tower = EvePatches

    def see(self, inputs: Inputs, pixels: Array, blocks: tuple[int, ...]) -> tuple[Array, list[Array]]:
        """Embeddings of windows and of the tokens around them.

        The patch layer has one block only: whichever is asked for, it is the class token's attention to the windows.
        """
        features, attention = self.vision(pixels, inputs.layout["member"])
        return features, [attention[None] for _ in blocks]

    def project(self, features: Float[Array, "R d"], inputs: Inputs) -> Float[Array, "R D"]:
        """Each to the decoder's width."""
        return self.projector(features)
