"""Decoders: the whole `config.json` of a text model, or the `text_config` of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import DecoderConfig, Raw, is_token_id
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import DeltaKind, GemmaKind, Kind, VariedKind
from vlkv.files import class_defaults

_TIE = "tie_word_embeddings"
_DEFAULTS = class_defaults("decoders")
_GEMMA: dict[str, Any] = dict(qk_norm=True, sandwich_norms=True, activation=("hidden_activation", "gelu_pytorch_tanh"))
_QWEN3_5: dict[str, Any] = dict(qk_norm=True, interleaved=True, partial=True)
KINDS = {
    "llama": Kind(defaults=_DEFAULTS["llama"]),
    "mistral": Kind(windows="all", bias=None, defaults=_DEFAULTS["mistral"]),
    "qwen2": Kind(qkv_bias=True, windows="typed", defaults=_DEFAULTS["qwen2"]),
    "qwen3": Kind(names="qwen3", qk_norm=True, windows="typed", defaults=_DEFAULTS["qwen3"]),
    "qwen3_moe": Kind(
        names="qwen3_moe", qk_norm=True, experts=True, windows="switched", defaults=_DEFAULTS["qwen3_moe"]
    ),
    "phi3": Kind(names="phi3", windows="all", bias=None, defaults=_DEFAULTS["phi3"]),
    "gemma3_text": GemmaKind(names="gemma3", defaults=_DEFAULTS["gemma3_text"], **_GEMMA),
    "gemma4_text": VariedKind(names="gemma4", defaults=_DEFAULTS["gemma4_text"], **_GEMMA),
    "qwen3_5_text": DeltaKind(names="qwen3_5", defaults=_DEFAULTS["qwen3_5_text"], **_QWEN3_5),
    "qwen3_5_moe_text": DeltaKind(
        names="qwen3_5_moe", experts=True, normalised=True, defaults=_DEFAULTS["qwen3_5_moe_text"], **_QWEN3_5
    ),
    "internlm2": Kind(names="internlm2", bias="bias", defaults=_DEFAULTS["internlm2"]),
}


def read_decoder(raw: Raw, default: str = "llama") -> DecoderConfig:
    """The decoder's config of any model, whose kind is `default` if it names none; InputError for an unsupported kind.

    If `raw` has `tie_word_embeddings` itself, that of `text_config` is not used.
    """
    part = text_part(raw)
    if _TIE in raw:
        part[_TIE] = bool(raw[_TIE])
    kind = part.get("model_type", default)
    if kind not in list(KINDS):  # a list, because the value may be of a type that cannot be hashed
        raise InputError(f"config.json: text_config.model_type={kind!r} is not supported "
                         f"(supported: {', '.join(KINDS)})")  # fmt: skip
    return KINDS[kind].read(part)


def read_stop(raw: Raw, default: int | None = None) -> tuple[int, ...]:
    """Stop tokens: those of generation_config.json, else of config.json, else of `text_config`, as in transformers.

    A place without `eos_token_id`, or with null, is skipped. The default replaces a missing field of `text_config`.
    """
    part = text_part(raw)
    if default is None:
        kind = next(kind for kind in (part.get("model_type"), raw.get("model_type"), "llama") if kind in list(KINDS))
        default = KINDS[kind].defaults.get("eos_token_id")
    places = {
        "generation_config.json: ": raw.get("generation_config") or {},
        "config.json: ": raw,
        "config.json: text_config.": {"eos_token_id": default, **part},
    }
    for place, fields in places.items():
        found = fields.get("eos_token_id")
        if found is not None:
            tokens = tuple(found) if isinstance(found, list | tuple) else (found,)
            if not all(map(is_token_id, tokens)):
                raise InputError(f"{place}eos_token_id={found!r} must be a token id or a list of them")
            return tokens
    return ()


def tied_by_either(raw: Raw) -> dict[str, Any]:
    """`raw`, with an outer `tie_word_embeddings` that is true if that of `raw` or of its `text_config` is.

    transformers reads the field so in families whose older configs have it in `text_config` alone.
    """
    return {**raw, _TIE: bool(raw.get(_TIE) or text_part(raw).get(_TIE))}


def text_part(raw: Raw) -> dict[str, Any]:
    """The fields of a `config.json` that describe the decoder."""
    part = raw if raw.get("model_type") in list(KINDS) else raw.get("text_config") or raw.get("llm_config") or {}
    if not isinstance(part, Mapping):
        raise InputError(f"config.json: text_config={part!r} must be an object")
    return dict(part)
