"""MobileVLM-V2: LLaVA-1.5 as its authors publish it, with a convolution behind the projector."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints_convert.tables import llava_original
from checkpoints_convert.tables.entry import Entry
from checkpoints_convert.tables.llava_original import ignored
from vlkv.config import ModelConfig

RENAMES = (
    (r"^model\.mm_projector\.mlp\.mlp\.(\d+)\.", r"model.mm_projector.\1."),
    (r"^model\.mm_projector\.peg\.peg\.0\.", "model.multi_modal_projector.depthwise."),
    *llava_original.RENAMES,
)
__all__ = ["RENAMES", "ignored", "table"]


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    yield from llava_original.table(config)
    key, d = "model.multi_modal_projector.depthwise", config.decoder.width
    yield Entry(key + ".weight", "projector.weight", (d, 1, 3, 3))
    yield Entry(key + ".bias", "projector.bias", (d,))
