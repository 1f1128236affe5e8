"""Tensor names of MobileVLM-V2: those of LLaVA-1.5's authors, and a convolution after the projector."""

from __future__ import annotations

import dataclasses

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.llava.original import original_names

_DEPTHWISE = "model.multi_modal_projector.depthwise"
_RENAMES = (
    (r"^model\.mm_projector\.mlp\.mlp\.(\d+)\.", r"model.mm_projector.\1."),
    (r"^model\.mm_projector\.peg\.peg\.0\.", f"{_DEPTHWISE}."),
)
_CONVOLUTION: dict[str, Name] = {"projector": _DEPTHWISE}  # its weight and bias


def names(config: ModelConfig) -> Names:
    """All tensors."""
    made = original_names(config)
    return dataclasses.replace(made, ours={**made.ours, **_CONVOLUTION}, renames=(*_RENAMES, *made.renames))
