"""Tensor names of MobileVLM-V2: those of LLaVA-1.5's authors, and a convolution after the projector."""

from __future__ import annotations

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig
from vlkv.families.llava.original import original_names

_DEPTHWISE = "model.multi_modal_projector.depthwise"
_RENAMES = (
    (r"^model\.mm_projector\.mlp\.mlp\.(\d+)\.", r"model.mm_projector.\1."),
    (r"^model\.mm_projector\.peg\.peg\.0\.", f"{_DEPTHWISE}."),
)


def names(config: ModelConfig) -> Names:
    """The names of all parameters; the projector's own weight and bias are those of the convolution."""
    return original_names(config).extended({"projector": _DEPTHWISE}, _RENAMES)
