"""Config of Qwen3.5 and its published sizes. Checkpoints of Qwen3.6 and 3.8 have the same form."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from vlkv.config import Raw, require
from vlkv.families.qwen3_vl.config import TOWER, Qwen3VlConfig
from vlkv.families.text.config import KINDS


class Qwen35Config(Qwen3VlConfig):
    """A dense decoder, or one with experts."""

    decoders: ClassVar = {kind: KINDS[f"{kind}_text"] for kind in ("qwen3_5", "qwen3_5_moe")}
    tower: ClassVar = {**TOWER, "deepstack_visual_indexes": ()}
    tied_by_either: ClassVar = ()
    tokens: ClassVar = (248056, 248057, 248044)

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require("language_model_only", bool(raw.get("language_model_only")), False)
        deep = (raw.get("vision_config") or {}).get("deepstack_visual_indexes") or []
        require("vision_config.deepstack_visual_indexes", deep, [])
        return super().read(raw)
