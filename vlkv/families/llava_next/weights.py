"""Tensor names of LLaVA-NeXT, OneVision and Video: those of LLaVA-1.5, and the newline."""

from __future__ import annotations

import dataclasses

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.llava import weights
from vlkv.families.llava.original import ORIGINAL_RENAMES

_NEWLINE: dict[str, Name] = {"newline": "model.image_newline"}


def names(config: ModelConfig) -> Names:
    """All tensors."""
    made = weights.names(config)
    renames = (*made.renames, (r"^image_newline$", "model.image_newline"))
    return dataclasses.replace(made, ours={**made.ours, **_NEWLINE}, renames=renames)


def original_names(config: ModelConfig) -> Names:
    """All tensors in the authors' form."""
    made = names(config)
    return dataclasses.replace(made, renames=(*ORIGINAL_RENAMES, *made.renames))
