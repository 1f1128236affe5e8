"""The language model of a `config.json`: the whole of it, or its `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config.decoder import DEFAULTS, TEXT_FAMILIES, DecoderConfig
from vlkv.errors import InputError


def read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A text model: nothing but a decoder."""
    return {"decoder": decoder(raw)}


def decoder(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder, whichever of the text families it is; raises InputError for another."""
    part = _part(raw)
    if "tie_word_embeddings" in raw:  # transformers reads the outer field
        part["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return DecoderConfig.from_hf(_family(part), part)


def stop(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence: those of generation, of the text, of the whole, of the class; in this order."""
    part = _part(raw)
    family = next(kind for kind in (part.get("model_type"), raw.get("model_type"), "llama") if kind in list(DEFAULTS))
    default = DEFAULTS[family].get("eos_token_id")
    found = generation.get("eos_token_id", part.get("eos_token_id", raw.get("eos_token_id", default)))
    found = () if found is None else (found,) if isinstance(found, int) else tuple(found)
    if not all(isinstance(token, int) for token in found):
        raise InputError(f"config.json: eos_token_id={found!r} must be a token id or a list of them")
    return found


def _part(raw: Mapping[str, Any]) -> dict[str, Any]:
    part = raw if raw.get("model_type") in TEXT_FAMILIES else raw.get("text_config") or raw.get("llm_config") or {}
    if not isinstance(part, Mapping):
        raise InputError(f"config.json: text_config={part!r} must be an object")
    return dict(part)


def _family(part: Mapping[str, Any]) -> str:
    family = part.get("model_type", "llama")
    if family not in TEXT_FAMILIES:
        raise InputError(f"config.json: text_config.model_type={family!r} is not supported "
                         f"(supported: {', '.join(TEXT_FAMILIES)})")  # fmt: skip
    return family
