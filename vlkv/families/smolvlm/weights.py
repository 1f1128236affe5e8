"""Tensor names of SmolVLM and Idefics3, which are the same in all versions of transformers."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.llava.weights import TOWER
from vlkv.families.text.weights import below, decoder


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    tower = below("vision.", "model.vision_model.", TOWER)
    projector: dict[str, Name] = {"projector": "model.connector.modality_projection.proj"}
    return Names(ours=decoder(config, "model.text_model.") | tower | projector)
