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


# --- published sizes --------------------------------------------------------------------------------------------------

_SMALL = dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12)
_MEDIUM = dict(depth=24, hidden_size=1024, intermediate_size=4096)


def _published(
    width: int, layers: int, heads: int, kv_heads: int, value_heads: int, tower: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Qwen/Qwen3.5-*, and models made from them. `more` has the channels of the MLP or the sizes of the experts."""
    family = "qwen3_5_moe" if "num_experts" in more else "qwen3_5"
    tied = more.pop("tie_word_embeddings", False)
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10],
                mrope_interleaved=True)  # fmt: skip
    text = dict(
        KINDS[f"{family}_text"].defaults, model_type=f"{family}_text", hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, linear_num_value_heads=value_heads,
        max_position_embeddings=262144, rope_parameters=rope, eos_token_id=248044,
    ) | more  # fmt: skip
    return dict(model_type=family, text_config=text, tie_word_embeddings=tied, image_token_id=248056,
                video_token_id=248057, eos_token_id=[248046, 248044],
                vision_config=Qwen35Config.tower | tower | dict(out_hidden_size=width))  # fmt: skip


def _experts(count: int, active: int, width: int) -> dict[str, int]:
    return dict(num_experts=count, num_experts_per_tok=active, moe_intermediate_size=width,
                shared_expert_intermediate_size=width)  # fmt: skip


_0_8B = _published(1024, 24, 8, 2, 16, _SMALL, intermediate_size=3584, tie_word_embeddings=True)
_4B: dict[str, Any] = dict(width=2560, layers=32, heads=16, kv_heads=4, value_heads=32, tower=_MEDIUM,
                           intermediate_size=9216)  # fmt: skip
_27B = _published(5120, 64, 24, 4, 48, {}, intermediate_size=17408)
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _0_8B,
    "qwen3.5-2b": _published(2048, 24, 8, 2, 16, _MEDIUM, intermediate_size=6144, tie_word_embeddings=True),
    "qwen3.5-4b": _published(**_4B, tie_word_embeddings=True),
    "qwen3.5-9b": _published(4096, 32, 16, 4, 32, {}, intermediate_size=12288),
    "qwen3.5-27b": _27B,
    "qwen3.5-35b-a3b": _published(2048, 40, 16, 2, 32, {}, **_experts(256, 8, 512)),
    "qwen3.5-122b-a10b": _published(3072, 48, 32, 2, 64, {}, **_experts(256, 8, 1024)),
    "qwen3.5-397b-a17b": _published(4096, 60, 32, 2, 64, {}, **_experts(512, 10, 1024)),
    "qwen3.8-27b": _27B,
    "chandra-ocr-2": _published(**_4B) | dict(eos_token_id=248044),  # with a head of its own
    "ovisocr2": _0_8B,
}
