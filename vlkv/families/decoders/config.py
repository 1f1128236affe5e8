"""Decoders: the whole `config.json` of a text model, or the `text_config` of a vision-language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import DecoderConfig, Raw, is_token_id
from vlkv.errors import InputError
from vlkv.families.decoders.kinds import DeltaKind, GemmaKind, Kind, VariedKind
from vlkv.families.decoders.layers import FULL, SLIDING

_TIE = "tie_word_embeddings"
_DELTA = dict(head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=32768, partial_rotary_factor=0.25,
              full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
              linear_num_key_heads=16, linear_num_value_heads=32)  # fmt: skip
KINDS = {
    "llama": Kind(defaults=dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        rms_norm_eps=1e-6, max_position_embeddings=2048, eos_token_id=2)),
    "mistral": Kind(windows="all", bias=None, defaults=dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rms_norm_eps=1e-6, max_position_embeddings=131072, sliding_window=4096,
        eos_token_id=2)),
    "qwen2": Kind(qkv_bias=True, windows="typed", defaults=dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=32768, use_sliding_window=False,
        sliding_window=4096, max_window_layers=28)),
    "qwen3": Kind(names="qwen3", qk_norm=True, windows="typed", defaults=dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=32768,
        use_sliding_window=False, sliding_window=4096, max_window_layers=28)),
    "qwen3_moe": Kind(names="qwen3_moe", qk_norm=True, experts=True, windows="switched", defaults=dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=24, num_attention_heads=32,
        num_key_value_heads=4, rms_norm_eps=1e-6, max_position_embeddings=32768, use_sliding_window=False,
        sliding_window=4096, decoder_sparse_step=1, mlp_only_layers=(), moe_intermediate_size=768,
        num_experts_per_tok=8, num_experts=128)),
    "phi3": Kind(names="phi3", windows="all", bias=None, defaults=dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096,
        eos_token_id=32000)),
    "gemma3_text": GemmaKind(names="gemma3", qk_norm=True, sandwich_norms=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"), defaults=dict(
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=131072, sliding_window=4096,
        query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6,
        tie_word_embeddings=True, eos_token_id=1)),
    "gemma4_text": VariedKind(names="gemma4", qk_norm=True, sandwich_norms=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"), defaults=dict(
        vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=131072, sliding_window=512,
        tie_word_embeddings=True, eos_token_id=1, rope_parameters={
            FULL: dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
            SLIDING: dict(rope_type="default", rope_theta=1e4)})),
    "qwen3_5_text": DeltaKind(names="qwen3_5", qk_norm=True, interleaved=True, partial=True, defaults=dict(
        _DELTA, vocab_size=248320, hidden_size=4096, intermediate_size=12288, num_hidden_layers=32,
        num_attention_heads=16, num_key_value_heads=4)),
    "qwen3_5_moe_text": DeltaKind(names="qwen3_5_moe", qk_norm=True, interleaved=True, partial=True, experts=True,
        normalised=True, defaults=dict(
        _DELTA, vocab_size=248320, hidden_size=2048, intermediate_size=512, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, decoder_sparse_step=1, mlp_only_layers=(),
        moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts_per_tok=8, num_experts=256)),
    "internlm2": Kind(names="internlm2", bias="bias", defaults=dict(
        vocab_size=103168, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        rms_norm_eps=1e-6, max_position_embeddings=2048, bias=True, eos_token_id=2)),
}  # fmt: skip


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
