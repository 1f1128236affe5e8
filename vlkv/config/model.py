"""A whole model's config: which family, its decoder, its tower, its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from vlkv.config import eve, llava, llava_original, qwen_vl, text
from vlkv.config.clip import ClipConfig
from vlkv.config.decoder import TEXT_FAMILIES, DecoderConfig
from vlkv.config.eve import EveVisionConfig
from vlkv.config.qwen_vl import QwenVitConfig
from vlkv.errors import InputError

# model_type of a config.json -> the fields of ModelConfig that this family reads from it, besides `stop`.
_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llava": llava.read,
    **dict.fromkeys(("llava_llama", "mobilevlm"), llava_original.read),
    "qwen": qwen_vl.read,
    "eve": eve.read,
    **dict.fromkeys(TEXT_FAMILIES, text.read),
}
FAMILIES = tuple(_READERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. `vision` and the tokens are None for a family without a tower."""

    family: str
    decoder: DecoderConfig
    vision: ClipConfig | EveVisionConfig | QwenVitConfig | None = None
    image_token: int | None = None
    video_token: int | None = None
    projector_bias: bool = True
    wiring: Any = None  # the family's own settings
    stop: tuple[int, ...] = ()  # ids that end a sequence

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads `config.json` and, where there is one, `generation_config.json` (for the stop ids).

        Raises:
            InputError: an unsupported `model_type`, or a field that we do not honour.
        """
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise InputError(f"config.json: model_type={family!r} is not supported (supported: {', '.join(FAMILIES)})")
        if raw.get("quantization_config"):
            raise InputError("config.json: quantization_config: quantised checkpoints are not supported; "
                             "use the original weights")  # fmt: skip
        fields = _READERS[family](raw)
        return cls(family=family, **{"stop": text.stop(raw, generation or {}), **fields})
