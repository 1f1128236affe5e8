"""Decoders: the whole `config.json` of a text model, or the `text_config` of a vision-language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from vlkv.config import DecoderConfig, Raw, filled, is_token_id, number, positive, positives, require, require_all
from vlkv.errors import InputError
from vlkv.families.text.rotary import read_rope
from vlkv.processing.host import HostConfig

_TIE = "tie_word_embeddings"
_ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of decoder.

    Attributes:
        defaults: class defaults in transformers, for fields that a config leaves out.
        bias: name of the field that gives attention biases.
        qkv_bias: True: queries, keys and values always have biases, and the output never has one.
        windowed: True: `sliding_window` is used without `use_sliding_window`.
        qk_norm: whether queries and keys of each head are normalised.
        interleaved: whether M-RoPE is interleaved, if the config has it.
        names: which tensor names the checkpoints have, if not those of Llama; see weights.py.
        activation: name of the field with the MLP's activation, and its only supported value.
    """

    defaults: Mapping[str, Any]
    bias: str = "attention_bias"
    qkv_bias: bool = False
    windowed: bool = False
    qk_norm: bool = False
    interleaved: bool = False
    names: str = ""
    activation: tuple[str, str] = ("hidden_act", "silu")

    def read(self, raw: Raw) -> DecoderConfig:
        """The decoder's config, from its part of a `config.json`; raises InputError for unsupported values."""
        c = filled(raw, self.defaults)
        if raw.get("sliding_window", 0) is None:
            c["sliding_window"] = None
        bias = bool(c.get(self.bias, False))
        if self.names == "phi3":
            require(self.bias, bias, False)
        require_all(c, {"partial_rotary_factor": 1.0, self.activation[0]: self.activation[1]})
        require("mlp_bias", bool(c.get("mlp_bias", False)), False)
        positives(c, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "max_position_embeddings"))  # fmt: skip
        heads, layers, limit = c["num_attention_heads"], c["num_hidden_layers"], c["max_position_embeddings"]
        kv_heads = positive("num_key_value_heads", c.get("num_key_value_heads", heads))
        head_dim = positive("head_dim", c.get("head_dim", c["hidden_size"] // heads))
        if heads % kv_heads or head_dim % 2:
            raise InputError(f"config.json: {heads} heads, {kv_heads} key heads of {head_dim} channels: the number of "
                             "key heads must divide the heads, and channels must be even")  # fmt: skip
        return DecoderConfig(
            vocab_size=c["vocab_size"], width=c["hidden_size"], mlp_width=c["intermediate_size"], layers=layers,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, norm_eps=c["rms_norm_eps"], max_positions=limit,
            rope=read_rope(c, head_dim, interleaved=self.interleaved), tied=bool(c.get("tie_word_embeddings", False)),
            qkv_bias=self.qkv_bias or bias, out_bias=bias and not self.qkv_bias, qk_norm=self.qk_norm, names=self.names,
            windows=self._windows(c), activation=self.activation[1],
        )  # fmt: skip

    def _windows(self, c: Raw) -> tuple[int | None, ...]:
        """`DecoderConfig.windows`. A window that is as long as the model's positions has no effect."""
        layers, limit, window = c["num_hidden_layers"], c["max_position_embeddings"], c.get("sliding_window")
        types, full = c.get("layer_types"), c.get("max_window_layers", 0)  # the first `full` layers have no window
        if types is not None and not (isinstance(types, list) and len(types) == layers
                                      and all(kind in _ATTENTION for kind in types)):  # fmt: skip
            raise InputError(f"config.json: layer_types={types!r} must be a list of {layers} layers, each "
                             f"{' or '.join(_ATTENTION)}")  # fmt: skip
        if not isinstance(full, int):
            raise InputError(f"config.json: max_window_layers={full!r} must be a whole number")
        if self.windowed:
            slides = [window is not None] * layers
        elif types is not None:
            slides = [kind == "sliding_attention" for kind in types]
        else:
            some = bool(c.get("use_sliding_window")) and window is not None
            slides = [some and i >= full for i in range(layers)]
        if not any(slides) or positive("sliding_window", window) >= limit:
            return ()
        return tuple(window if slide else None for slide in slides)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(Kind):
    """Gemma 3: most layers have a window, and a RoPE of their own."""

    @override
    def read(self, raw: Raw) -> DecoderConfig:
        c = filled(raw, self.defaults)
        require_all(c, {"use_bidirectional_attention": False, "final_logit_softcapping": None,
                        "attn_logit_softcapping": None})  # fmt: skip
        pattern = positive("sliding_window_pattern", c["sliding_window_pattern"])
        layers, scalar = positive("num_hidden_layers", c["num_hidden_layers"]), c["query_pre_attn_scalar"]
        types = [_ATTENTION[(i + 1) % pattern > 0] for i in range(layers)]
        ropes = self._ropes(c)
        decoder = super().read({"layer_types": types, **c, **ropes["full_attention"]})
        return dataclasses.replace(
            decoder, sandwich_norms=True, norm_offset=1.0, embedding_scale=decoder.width**0.5,
            query_scale=(decoder.head_dim / number("query_pre_attn_scalar", scalar)) ** 0.5,
            sliding_rope=read_rope({**c, **ropes["sliding_attention"]}, decoder.head_dim),
        )  # fmt: skip

    def _ropes(self, c: Raw) -> dict[str, dict[str, Any]]:
        """For each kind of layer, the fields of RoPE, as other models have them. Only full attention is scaled."""
        given = c.get("rope_parameters") or {}
        if not isinstance(given, Mapping) or not set(given) <= set(_ATTENTION):
            raise InputError(f"config.json: rope_parameters={given!r} must have {' and '.join(_ATTENTION)}")
        thetas = {"full_attention": c["rope_theta"], "sliding_attention": c["rope_local_base_freq"]}
        scaled = {"full_attention": c.get("rope_scaling"), "sliding_attention": None}
        ropes: dict[str, dict[str, Any]] = {}
        for kind, theta in thetas.items():
            part = given.get(kind) or scaled[kind] or {}
            if not isinstance(part, Mapping):
                raise InputError(f"config.json: the RoPE of {kind}, {part!r}, must be an object")
            require(f"the rope_type of {kind}", part.get("rope_type", "default"), "default", "linear")
            ropes[kind] = {"rope_theta": theta, "rope_scaling": None, "rope_parameters": dict(part)}
        return ropes


KINDS = {
    "llama": Kind(defaults=dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        rms_norm_eps=1e-6, max_position_embeddings=2048, eos_token_id=2)),
    "mistral": Kind(windowed=True, defaults=dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rms_norm_eps=1e-6, max_position_embeddings=131072, sliding_window=4096,
        eos_token_id=2)),
    "qwen2": Kind(qkv_bias=True, defaults=dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, rms_norm_eps=1e-6, max_position_embeddings=32768, use_sliding_window=False,
        sliding_window=4096, max_window_layers=28)),
    "qwen3": Kind(names="qwen3", qk_norm=True, defaults=dict(
        vocab_size=151936, hidden_size=4096, intermediate_size=22016, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=32768,
        use_sliding_window=False, sliding_window=4096, max_window_layers=28)),
    "phi3": Kind(names="phi3", windowed=True, defaults=dict(
        vocab_size=32064, hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=32,
        rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096,
        eos_token_id=32000)),
    "gemma3_text": Gemma3(names="gemma3", qk_norm=True, activation=("hidden_activation", "gelu_pytorch_tanh"),
        defaults=dict(
        vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, rms_norm_eps=1e-6, max_position_embeddings=131072, sliding_window=4096,
        query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6,
        tie_word_embeddings=True, eos_token_id=1)),
    "internlm2": Kind(names="internlm2", bias="bias", defaults=dict(
        vocab_size=103168, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        rms_norm_eps=1e-6, max_position_embeddings=2048, bias=True, eos_token_id=2)),
}  # fmt: skip


class TextConfig(HostConfig):
    """A text model."""

    @classmethod
    @override
    def read(cls, raw: Raw) -> dict[str, Any]:
        return {"decoder": read_decoder(raw)}


def read_decoder(raw: Raw) -> DecoderConfig:
    """The decoder's config of any model; raises InputError for an unsupported kind.

    If `raw` has `tie_word_embeddings` itself, that of `text_config` is not used.
    """
    part = text_part(raw)
    if _TIE in raw:
        part[_TIE] = raw[_TIE]
    kind = part.get("model_type", "llama")
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


# --- published sizes ------------------------------------------------------------------------------------------------

VICUNA_13B = dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
                  num_key_value_heads=40)  # fmt: skip


def llama(**sizes: Any) -> dict[str, Any]:
    """Llama 2 7B, with the given fields replaced."""
    return dict(KINDS["llama"].defaults, model_type="llama", num_key_value_heads=32, max_position_embeddings=4096,
                rms_norm_eps=1e-5, bos_token_id=1, tie_word_embeddings=False) | sizes  # fmt: skip


def _llama3(factor: float, **sizes: Any) -> dict[str, Any]:
    """Llama 3.1 and 3.2 (Instruct), for prompts of 131072 tokens."""
    scaling = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)  # fmt: skip
    return llama(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=5e5,
                 rope_scaling=scaling, bos_token_id=128000, eos_token_id=[128001, 128008, 128009], **sizes)  # fmt: skip


def _qwen2(**sizes: Any) -> dict[str, Any]:
    return dict(model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False, sliding_window=32768,
                max_position_embeddings=32768, eos_token_id=151645) | sizes  # fmt: skip


def internlm2(factor: float = 2.0, **sizes: Any) -> dict[str, Any]:
    """InternLM2 7B for prompts of 32768 tokens, with the given fields replaced."""
    return dict(KINDS["internlm2"].defaults, model_type="internlm2", vocab_size=92544, intermediate_size=14336,
                num_key_value_heads=8, max_position_embeddings=32768, rope_theta=1e6, bias=False, rms_norm_eps=1e-5,
                rope_scaling=dict(type="dynamic", factor=factor), tie_word_embeddings=False) | sizes  # fmt: skip


# Qwen2 and Qwen2.5; 3b exists only in Qwen2.5.
QWEN2 = {
    "0.5b": _qwen2(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                   num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "1.5b": _qwen2(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                   num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "3b": _qwen2(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "7b": _qwen2(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                 num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
    "72b": _qwen2(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
                  num_key_value_heads=8, vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip


def _qwen3(**sizes: Any) -> dict[str, Any]:
    return dict(KINDS["qwen3"].defaults, model_type="qwen3", num_key_value_heads=8, max_position_embeddings=40960,
                rope_theta=1e6, eos_token_id=[151645, 151643]) | sizes  # fmt: skip


QWEN3 = {
    "0.6b": _qwen3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                   tie_word_embeddings=True),
    "1.7b": _qwen3(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                   tie_word_embeddings=True),
    "4b": _qwen3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, tie_word_embeddings=True),
    "8b": _qwen3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, tie_word_embeddings=False),
    "14b": _qwen3(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
                  tie_word_embeddings=False),
    "32b": _qwen3(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
                  tie_word_embeddings=False),
}  # fmt: skip
# Gemma 3 (Instruct); larger ones see images.
GEMMA3 = dict(KINDS["gemma3_text"].defaults, model_type="gemma3_text", vocab_size=262144, num_attention_heads=4,
              num_key_value_heads=1, max_position_embeddings=32768, sliding_window=512,
              eos_token_id=[1, 106])  # fmt: skip
# Instruct v0.2; v0.1 has a sliding window.
MISTRAL = dict(KINDS["mistral"].defaults, model_type="mistral", rms_norm_eps=1e-5, rope_theta=1e6,
               max_position_embeddings=32768, sliding_window=None, tie_word_embeddings=False)  # fmt: skip
# Phi-3-mini-128k-instruct, first version; its factors are rounded to remove float32 noise.
_SHORT = [1.05, 1.05, 1.05, 1.1, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.5, *[2.0] * 21, 2.05, 2.05, 2.05, 2.1, 2.1, 2.1,
          2.15, 2.15, 2.35, 2.55, 2.6, 2.6, 2.75, 2.85, 2.85, 2.95]  # fmt: skip
_LONG = [1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58,
         15.66, 15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77,
         59.92, 61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81]  # fmt: skip
PHI3_MINI = dict(KINDS["phi3"].defaults, model_type="phi3", max_position_embeddings=131072, sliding_window=262144,
                 rope_scaling=dict(type="su", short_factor=_SHORT, long_factor=_LONG),
                 tie_word_embeddings=False)  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "vicuna-1.5-7b": llama(),
    "vicuna-1.5-13b": llama(**VICUNA_13B),
    "llama-3-8b": llama(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, rope_theta=5e5,
                        max_position_embeddings=8192, bos_token_id=128000, eos_token_id=128009),
    "llama-3.1-8b": _llama3(8.0, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                            num_attention_heads=32, head_dim=128, tie_word_embeddings=False),
    "llama-3.2-1b": _llama3(32.0, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                            num_attention_heads=32, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(32.0, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                            num_attention_heads=24, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": MISTRAL,
    "mistral-7b-v0.1": MISTRAL | dict(rope_theta=1e4, sliding_window=4096),
    "gemma-3-270m": GEMMA3 | dict(hidden_size=640, intermediate_size=2048, num_hidden_layers=18),
    "gemma-3-1b": GEMMA3 | dict(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26),
    **{f"qwen2-{size}": QWEN2[size] for size in ("0.5b", "1.5b", "7b")},
    **{f"qwen3-{size}": fields for size, fields in QWEN3.items()},
    "phi-3-mini": PHI3_MINI,
    "internlm2-7b": internlm2(),
}  # fmt: skip
