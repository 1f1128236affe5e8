"""MobileVLM-V2 in its authors' form (`mtgv/MobileVLM_V2-*`), which is that of LLaVA-1.5's authors."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vlkv.config import Raw, require_all
from vlkv.errors import InputError
from vlkv.families.llava.original import LlavaOriginalConfig

SIDE = 12  # LDPv2 always pools to 12 x 12 tokens


class MobileVlmConfig(LlavaOriginalConfig):
    """The projector pools a square of patches, so the class token must be dropped."""

    projector = "ldpnetv2"

    @property
    @override
    def side(self) -> int:
        return SIDE

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        require_all(raw, {"mm_vision_select_feature": "patch"})
        fields = super().read(raw)
        if (grid := fields["vision"].grid) % SIDE:
            raise InputError(f"config.json: a tower of {grid} x {grid} patches is not supported: "
                             f"the projector pools them to {SIDE} x {SIDE}")  # fmt: skip
        return fields
