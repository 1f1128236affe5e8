"""LLaVA-1.5 as its authors publish it, brought to transformers' names for it: decoder, CLIP tower, projector."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints_convert.tables import llava
from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry, affine
from checkpoints_convert.tables.llava import ignored
from vlkv.config import ClipConfig, ModelConfig

TOWER = "model.vision_tower."
RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^model\.vision_tower\.vision_tower\.", "model.vision_tower."),
    (r"^model\.mm_projector\.0\.", "model.multi_modal_projector.linear_1."),
    (r"^model\.mm_projector\.2\.", "model.multi_modal_projector.linear_2."),
    *llava.RENAMES,
)
__all__ = ["RENAMES", "TOWER", "ignored", "table"]


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    assert isinstance(config.vision, ClipConfig)
    d, prefix = config.decoder.width, "model.multi_modal_projector."
    yield from decoder(config.decoder, "model.language_model.")
    yield from llava.tower(config.vision, TOWER)
    yield from affine(prefix + "linear_1", "projector.first", (d, config.vision.width))
    yield from affine(prefix + "linear_2", "projector.second", (d, d))
