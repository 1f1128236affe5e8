"""Original checkpoints of LLaVA-Video and OneVision: the tensors of LLaVA-OneVision under older names."""

from __future__ import annotations

from checkpoints_convert.tables.llava_next import ignored, table

RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^model\.mm_projector\.0\.", "model.multi_modal_projector.linear_1."),
    (r"^model\.mm_projector\.2\.", "model.multi_modal_projector.linear_2."),
    (r"^model\.vision_tower\.vision_tower\.(?:vision_model\.)?", "model.vision_tower."),
)

__all__ = ["RENAMES", "ignored", "table"]
