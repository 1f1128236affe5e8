"""Tensor names of Gemma 3 with images."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.llava.weights import RENAMES, TOWER
from vlkv.families.text.weights import below, decoder

_PROJECTOR: dict[str, Name] = {"norm": "mm_soft_emb_norm", "matrix": "mm_input_projection_weight"}


def names(config: ModelConfig) -> Names:
    """The names of all parameters. A pooling head of the tower is unused."""
    vision = below("vision.", "model.vision_tower.", TOWER)
    projector = below("projector.", "model.multi_modal_projector.", _PROJECTOR)
    ours = decoder(config, "model.language_model.") | vision | projector
    return Names(ours=ours, renames=RENAMES, unused=r"^model\.vision_tower\.head\.")
