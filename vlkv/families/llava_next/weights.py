"""Tensor names of LLaVA-NeXT, OneVision and Video: those of LLaVA-1.5, and the newline."""

from __future__ import annotations

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig
from vlkv.families.llava import weights
from vlkv.families.llava.original import ORIGINAL_RENAMES


def names(config: ModelConfig) -> Names:
    """The names of all parameters in transformers' form."""
    newline = "model.image_newline"
    return weights.names(config).extended({"newline": newline}, ((r"^image_newline$", newline),))


def original_names(config: ModelConfig) -> Names:
    """The names of all parameters in the authors' form."""
    return names(config).extended(renames=ORIGINAL_RENAMES)
