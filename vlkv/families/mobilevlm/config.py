"""MobileVLM-V2 in its authors' form (`mtgv/MobileVLM_V2-*`), which is that of LLaVA-1.5's authors."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from vlkv.config import Raw, require_all
from vlkv.errors import InputError
from vlkv.families.llava.original import LlavaOriginalConfig
from vlkv.families.text.published import llama

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


def _published(**sizes: Any) -> dict[str, Any]:
    return llama(**sizes) | dict(
        model_type="mobilevlm", mm_vision_tower="openai/clip-vit-large-patch14-336", mm_hidden_size=1024,
        mm_projector_type="ldpnetv2", mm_vision_select_layer=-2, image_aspect_ratio="pad",
    )  # fmt: skip


PUBLISHED = {
    "mobilevlm-v2-1.7b": _published(hidden_size=2048, intermediate_size=5632, num_hidden_layers=24,
                                    num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=2048,
                                    rms_norm_eps=1e-6),
    "mobilevlm-v2-3b": _published(hidden_size=2560, intermediate_size=6912, max_position_embeddings=2048,
                                  rms_norm_eps=1e-6),
    "mobilevlm-v2-7b": _published(),
}  # fmt: skip
