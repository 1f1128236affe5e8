"""Text models: Llama, Mistral, Qwen2, Qwen3, Qwen3.5, Phi-3, Gemma 3, InternLM2."""

from __future__ import annotations

import dataclasses
from typing import Any

from typing_extensions import override

from vlkv.config import Raw
from vlkv.families.decoders.kinds import KINDS, read_decoder
from vlkv.families.family import Family, TextModel
from vlkv.families.names import stored_names
from vlkv.processing.host import HostConfig


class TextConfig(HostConfig):
    """A text model."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        decoder = read_decoder(raw)
        # The position of a token of text is the same on all axes.
        return {"decoder": dataclasses.replace(decoder, rope=dataclasses.replace(decoder.rope, axes=None))}


FAMILIES = dict.fromkeys(KINDS, Family(config=TextConfig, model=TextModel, names=stored_names("text")))
