"""The kinds of decoders, one for each config class of transformers: which fields the class reads, and its defaults.

A decoder is the whole `config.json` of a text model, or the `text_config` of a vision-language model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import override

from vlkv.config import (
    DecoderConfig,
    ExpertsConfig,
    Raw,
    filled,
    is_token_id,
    number,
    positive,
    positives,
    require,
    require_all,
)
from vlkv.errors import InputError
from vlkv.families.decoders.layers import (
    FULL,
    SLIDING,
    full_heads,
    gemma4_fields,
    gemma4_layer_types,
    periodic,
    read_layer_types,
    read_recurrent,
)
from vlkv.families.decoders.rotary import read_rope
from vlkv.files import class_defaults

# Fields in which null is not the default: no window, as many key heads as heads, the width divided among the heads; and
# attention in both directions, which is refused.
_NULLS = ("sliding_window", "num_key_value_heads", "head_dim", "is_causal")
_EVERY_LAYER = ("decoder_sparse_step", "mlp_only_layers")  # not read by Qwen3.5, in which every layer has experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of decoder."""

    defaults: Mapping[str, Any]  # class defaults in transformers, for fields that a config leaves out
    bias: str | None = "attention_bias"  # field that gives attention biases; None: none, whatever the file says
    qkv_bias: bool = False  # queries, keys and values always have biases, and the output never has one
    # Which layers have a window: "none"; "all"; "switched": all, if `use_sliding_window`; "typed": those of
    # `layer_types`, or the layers from `max_window_layers` on, if `use_sliding_window`. The class of transformers
    # decides that; fields of other classes are ignored, as transformers does.
    windows: Literal["none", "all", "switched", "typed"] = "none"
    qk_norm: bool = False  # queries and keys of each head are normalised
    interleaved: bool = False  # M-RoPE is interleaved, if the config has M-RoPE; see rotary.py
    partial: bool = False  # `partial_rotary_factor` is used
    neighbours: bool = False  # as in RopeConfig
    sandwich_norms: bool = False  # as in DecoderConfig
    experts: bool = False  # layers may have experts in place of the MLP
    normalised: bool = False  # shares of experts always sum to 1; False: if `norm_topk_prob` says so
    names: str = ""  # tensor names of the checkpoints, if not those of Llama; see names.py
    activation: tuple[str, str] = ("hidden_act", "silu")  # of the MLP: its field, and the only supported value

    def fields(self, raw: Raw) -> dict[str, Any]:
        """`raw` with defaults for fields that are missing, or null without a meaning of its own."""
        return filled(raw, self.defaults) | {name: None for name in _NULLS if raw.get(name, "") is None}

    def read(self, raw: Raw) -> DecoderConfig:
        """The decoder's config, from its part of a `config.json`; raises InputError for unsupported values."""
        c = self.fields(raw)
        require("is_causal", raw.get("is_causal", True), True)
        bias = self.bias is not None and bool(c.get(self.bias, False))
        require_all(c, {self.activation[0]: self.activation[1]})
        require("mlp_bias", bool(c.get("mlp_bias", False)), False)
        positives(c, ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                      "max_position_embeddings"))  # fmt: skip
        heads, layers, limit = c["num_attention_heads"], c["num_hidden_layers"], c["max_position_embeddings"]
        kv_heads, head_dim = c.get("num_key_value_heads"), c.get("head_dim")
        kv_heads = positive("num_key_value_heads", heads if kv_heads is None else kv_heads)
        head_dim = positive("head_dim", c["hidden_size"] // heads if head_dim is None else head_dim)
        if heads % kv_heads or head_dim % 2:
            raise InputError(f"config.json: {heads} heads, {kv_heads} key heads of {head_dim} channels: the number of "
                             "key heads must divide the heads, and channels must be even")  # fmt: skip
        return DecoderConfig(
            vocab_size=c["vocab_size"], width=c["hidden_size"], mlp_width=c["intermediate_size"], layers=layers,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, norm_eps=c["rms_norm_eps"], max_positions=limit,
            rope=read_rope(c, head_dim, interleaved=self.interleaved, partial=self.partial, neighbours=self.neighbours),
            tied=bool(c.get("tie_word_embeddings", False)), sandwich_norms=self.sandwich_norms,
            experts=self._read_experts(c, raw) if self.experts else None,
            qkv_bias=self.qkv_bias or bias, out_bias=bias and not self.qkv_bias, qk_norm=self.qk_norm, names=self.names,
            windows=self._windows(c), activation=self.activation[1],
        )  # fmt: skip

    def _read_experts(self, c: Raw, raw: Raw) -> ExpertsConfig | None:
        """Which layers have experts, and their sizes; None if no layer has. `c` is `raw` with the defaults."""
        layers, step = c["num_hidden_layers"], positive("decoder_sparse_step", c["decoder_sparse_step"])
        count = c.get("num_local_experts", c["num_experts"])  # transformers 5 has both names for this field
        if raw.get("num_experts") not in (None, count):
            raise InputError(f"config.json: num_experts={raw['num_experts']!r} and num_local_experts={count!r} are "
                             "names of the same field, so give one")  # fmt: skip
        if not is_token_id(count):
            raise InputError(f"config.json: num_experts={count!r} must be a whole number of at least 0")
        dense = c["mlp_only_layers"]
        if not isinstance(dense, list | tuple) or not all(isinstance(i, int) and 0 <= i < layers for i in dense):
            raise InputError(f"config.json: mlp_only_layers={dense!r} must be indices of {layers} layers")
        sparse = tuple(i for i in range(layers) if count and i not in dense and (i + 1) % step == 0)
        if not sparse:
            return None
        positives(c, ("num_experts_per_tok", "moe_intermediate_size"))
        active, normalised = c["num_experts_per_tok"], c.get("norm_topk_prob", self.normalised)
        if active > count:
            raise InputError(f"config.json: num_experts_per_tok={active} exceeds the number of experts, {count}")
        require("norm_topk_prob", normalised, *((True,) if self.normalised else (True, False)))
        shared = c.get("shared_expert_intermediate_size")
        return ExpertsConfig(
            layers=sparse, count=count, active=active, width=c["moe_intermediate_size"], normalised=normalised,
            shared=None if shared is None else positive("shared_expert_intermediate_size", shared),
        )  # fmt: skip

    def _windows(self, c: Raw) -> tuple[int | None, ...]:
        """`DecoderConfig.windows`. A window that is as long as the model's positions has no effect."""
        if self.windows == "none":
            return ()
        layers, limit, window = c["num_hidden_layers"], c["max_position_embeddings"], c.get("sliding_window")
        if self.windows != "all" and not c.get("use_sliding_window"):
            window = None
        slides = [window is not None] * layers
        if self.windows == "typed":
            slides = self._typed(c, slides)
        if any(slides) and window is None:
            raise InputError(f"config.json: layer_types has {SLIDING}, so use_sliding_window must be true and "
                             "sliding_window a number")  # fmt: skip
        if not any(slides) or positive("sliding_window", window) >= limit:
            return ()
        return tuple(window if slide else None for slide in slides)

    def _typed(self, c: Raw, slides: list[bool]) -> list[bool]:
        """Which layers have a window: those of `layer_types`, else those of `slides` from `max_window_layers` on."""
        types, full = read_layer_types(c, FULL, SLIDING), c["max_window_layers"]
        if types is not None:
            return [kind == SLIDING for kind in types]
        if not isinstance(full, int):
            raise InputError(f"config.json: max_window_layers={full!r} must be a whole number")
        return [slide and i >= full for i, slide in enumerate(slides)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaKind(Kind):
    """Gemma 3: most layers have a window, and a RoPE of their own."""

    @override
    def read(self, raw: Raw) -> DecoderConfig:
        c = self.fields(raw)
        require_all(c, {"use_bidirectional_attention": False, "final_logit_softcapping": None,
                        "attn_logit_softcapping": None})  # fmt: skip
        pattern = positive("sliding_window_pattern", c["sliding_window_pattern"])
        layers, scalar = positive("num_hidden_layers", c["num_hidden_layers"]), c["query_pre_attn_scalar"]
        types = periodic(pattern, layers, others=SLIDING)
        ropes = _ropes(c, {FULL: c["rope_theta"], SLIDING: c["rope_local_base_freq"]}, "linear")
        decoder = super().read({"layer_types": types, **c, **ropes[FULL]})
        return dataclasses.replace(
            decoder, norm_offset=1.0, embedding_scale=decoder.width**0.5,
            query_scale=(decoder.head_dim / number("query_pre_attn_scalar", scalar)) ** 0.5,
            sliding_rope=read_rope({**c, **ropes[SLIDING]}, decoder.head_dim),
        )  # fmt: skip

    @override
    def _windows(self, c: Raw) -> tuple[int | None, ...]:
        """A window that reaches over all positions is kept too, because its layer has the RoPE of sliding layers."""
        types = read_layer_types(c, FULL, SLIDING) or ()
        window = min(positive("sliding_window", c["sliding_window"]), c["max_position_embeddings"])
        return tuple(window if kind == SLIDING else None for kind in types) if SLIDING in types else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariedKind(Kind):
    """Gemma 4: the two kinds of layers also differ in their heads, and some layers share keys and values."""

    @override
    def read(self, raw: Raw) -> DecoderConfig:
        c = self.fields(raw) | {"rope_scaling": None}  # as transformers does, only `rope_parameters` is read
        types, ropes = gemma4_layer_types(c), _ropes(c, {}, "proportional")
        full = full_heads(c, types)
        decoder = super().read({**c, **full, **ropes[FULL]})
        sliding_rope = read_rope({**c, **ropes[SLIDING]}, positive("head_dim", c["head_dim"]))
        return dataclasses.replace(decoder, sliding_rope=sliding_rope, **gemma4_fields(c, types, decoder.width))


def _ropes(c: Raw, thetas: Mapping[str, Any], *scalings: str) -> dict[str, dict[str, Any]]:
    """For each kind of layer, the fields of RoPE, as other models have them.

    `thetas`: the base if a kind's part of `rope_parameters` has none. `scalings`: supported types besides "default".
    """
    by_kind, scaling = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    if not isinstance(by_kind, Mapping) or not set(by_kind) <= {FULL, SLIDING}:
        raise InputError(f"config.json: rope_parameters={by_kind!r} must have {FULL} and {SLIDING}")
    ropes: dict[str, dict[str, Any]] = {}
    for kind in (FULL, SLIDING):
        parts = (by_kind.get(kind) or {}, scaling if kind == FULL else {})
        if not all(isinstance(part, Mapping) for part in parts):
            raise InputError(f"config.json: the RoPE of {kind}, {parts!r}, must be an object")
        rope = {**parts[0], **parts[1]}
        named = rope.get("rope_type", "default")
        if rope.pop("type", named) != named:  # transformers ignores `type` here
            raise InputError(f"config.json: the RoPE of {kind} must have its type as rope_type, not as type")
        require(f"the rope_type of {kind}", named, "default", *scalings)
        theta = rope.get("rope_theta", thetas.get(kind))
        if theta is None:
            raise InputError(f"config.json: rope_parameters.{kind} has no rope_theta")
        ropes[kind] = {"rope_theta": theta, "rope_scaling": None, "rope_parameters": rope}
    return ropes


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaKind(Kind):
    """Qwen3.5: most layers have the gated delta rule in place of attention, and outputs of attention are gated."""

    @override
    def read(self, raw: Raw) -> DecoderConfig:
        c = self.fields({name: value for name, value in raw.items() if name not in _EVERY_LAYER})
        require_all(c, {"attn_output_gate": True, "output_gate_type": "swish"})
        rope = c.get("rope_parameters") or {}
        # The default of transformers has 32 channel pairs, so it fits only if 64 channels of a head are rotated.
        if (
            isinstance(rope, Mapping)
            and positive("head_dim", c["head_dim"]) * rope.get("partial_rotary_factor", c["partial_rotary_factor"])
            == 64
        ):
            c["rope_parameters"] = {"mrope_section": [11, 11, 10], **rope}
        decoder = super().read(c)
        recurrent = read_recurrent(c)
        return dataclasses.replace(decoder, norm_offset=1.0, gated=True, recurrent=recurrent)


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

    A file or part without `eos_token_id`, or with null, is skipped. `default` replaces a missing field of
    `text_config`; None: the default of the decoder's class.
    """
    part = text_part(raw)
    if default is None:
        kind = next(kind for kind in (part.get("model_type"), raw.get("model_type"), "llama") if kind in list(KINDS))
        default = KINDS[kind].defaults.get("eos_token_id")
    parts = {
        "generation_config.json: ": raw.get("generation_config") or {},
        "config.json: ": raw,
        "config.json: text_config.": {"eos_token_id": default, **part},
    }
    for part_name, fields in parts.items():
        stop = fields.get("eos_token_id")
        if stop is not None:
            tokens = tuple(stop) if isinstance(stop, list | tuple) else (stop,)
            if not all(map(is_token_id, tokens)):
                raise InputError(f"{part_name}eos_token_id={stop!r} must be a token id or a list of them")
            return tokens
    return ()


def tied_by_either(raw: Raw) -> dict[str, Any]:
    """`raw`, with an outer `tie_word_embeddings` that is true if that of `raw` or of its `text_config` is.

    transformers does the same for families whose older configs have the field in `text_config` alone.
    """
    return {**raw, _TIE: bool(raw.get(_TIE) or text_part(raw).get(_TIE))}


def text_part(raw: Raw) -> dict[str, Any]:
    """The fields of a `config.json` that describe the decoder."""
    part = raw if raw.get("model_type") in list(KINDS) else raw.get("text_config") or raw.get("llm_config") or {}
    if not isinstance(part, Mapping):
        raise InputError(f"config.json: text_config={part!r} must be an object")
    return dict(part)
