"""A whole model's config: which family, its decoder, its tower, its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from vlkv.config import (
    eve,
    internvl,
    internvl_chat,
    llava,
    llava_next,
    llava_onevision,
    llava_original,
    llava_video,
    qwen2_vl,
    qwen_vl,
    text,
)
from vlkv.config.clip import ClipConfig
from vlkv.config.decoder import TEXT_FAMILIES, DecoderConfig
from vlkv.config.eve import EveVisionConfig
from vlkv.config.internvit import InternVitConfig
from vlkv.config.qwen2_vision import QwenVisionConfig
from vlkv.config.qwen_vl import QwenVitConfig
from vlkv.config.siglip import SiglipConfig
from vlkv.errors import InputError

# model_type of a config.json -> the fields of ModelConfig that this family reads from it, besides `stop`.
_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llava": llava.read,
    "llava_next": llava_next.read,
    "llava_next_video": llava_next.read_video,
    "llava_onevision": llava_onevision.read,
    "llava_qwen": llava_video.read,
    "internvl": internvl.read,
    "internvl_chat": internvl_chat.read,
    "qwen2_vl": qwen2_vl.read,
    "qwen2_5_vl": qwen2_vl.read,
    **dict.fromkeys(("llava_llama", "mobilevlm"), llava_original.read),
    "qwen": qwen_vl.read,
    "eve": eve.read,
    **dict.fromkeys(TEXT_FAMILIES, text.read),
}
FAMILIES = tuple(_READERS)
Vision = ClipConfig | SiglipConfig | InternVitConfig | QwenVisionConfig | QwenVitConfig | EveVisionConfig
# Architecture of an original checkpoint, whose model_type does not tell -> its config as transformers would write it.
_ORIGINALS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"LlavaQwenForCausalLM": llava_video.nested}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `vision` and the tokens are None for a family without a tower."""

    family: str
    decoder: DecoderConfig
    vision: ClipConfig | SiglipConfig | InternVitConfig | QwenVisionConfig | QwenVitConfig | EveVisionConfig | None = (
        None
    )
    image_token: int | None = None
    video_token: int | None = None
    projector_bias: bool = True
    wiring: Any = None  # the family's own settings
    stop: tuple[int, ...] = ()  # ids that end a sequence

    @classmethod
    def from_hf(
        cls,
        raw: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        added: Mapping[str, int] | None = None,
    ) -> ModelConfig:
        """Reads `config.json` and, where there is one, `generation_config.json` (for the stop ids).

        Args:
            raw: `config.json`.
            generation: `generation_config.json`.
            added: ids of the tokenizer's added tokens by their spelling, for families whose config names none.

        Raises:
            InputError: an unsupported `model_type`, or a field that we do not honour.
        """
        architectures = raw.get("architectures") or ()
        if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
            raise InputError(f"config.json: architectures={architectures!r} must be a list of names")
        for architecture in architectures:
            raw = _ORIGINALS.get(architecture, dict)(raw)
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise InputError(f"config.json: model_type={family!r} is not supported (supported: {', '.join(FAMILIES)})")
        if raw.get("quantization_config"):
            raise InputError("config.json: quantization_config: quantised checkpoints are not supported; "
                             "use the original weights")  # fmt: skip
        # Under a name that no config.json has.
        fields = _READERS[family]({**raw, "added_tokens": added or {}})
        return cls(family=family, **{"stop": text.stop(raw, generation or {}), **fields})
