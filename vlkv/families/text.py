"""Text models: Llama, Mistral, Qwen2, Qwen3, Qwen3.5, Phi-3, Gemma 3, InternLM2."""

from __future__ import annotations

import dataclasses
from typing import Any

from typing_extensions import override

from checkpoints_convert.entry import Names
from vlkv.config import ModelConfig, Raw
from vlkv.families.decoders.kinds import KINDS, read_decoder
from vlkv.families.family import Family, TextModel
from vlkv.families.names import decoder, unused
from vlkv.processing.host import HostConfig


class TextConfig(HostConfig):
    """A text model."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        decoder = read_decoder(raw)
        # The position of a token of text is the same on all axes.
        return {"decoder": dataclasses.replace(decoder, rope=dataclasses.replace(decoder.rope, axes=None))}


def names(config: ModelConfig) -> Names:
    """The names of all parameters of a text model."""
    # InternLM2; and text-only Qwen3.5, which transformers 5.2 writes as the part of the model with images.
    renames = ((r"^output\.", "lm_head."), (r"^model\.language_model\.", "model."))
    return Names(ours=decoder(config, "model."), renames=renames, unused=unused(config, r"model\."))


FAMILIES = dict.fromkeys(KINDS, Family(config=TextConfig, model=TextModel, names=names))
