"""Kinds of layers in a `config.json`: its `layer_types`, recurrent layers, and what Gemma 4 has beyond Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlkv.config import (
    ExpertsConfig,
    LayerInputsConfig,
    Raw,
    RecurrentConfig,
    number,
    positive,
    positives,
    require,
    token_id,
)
from vlkv.errors import InputError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(c: Raw, *kinds: str) -> list[str] | None:
    """The kind of each layer; None if the field is missing. Raises InputError for other kinds than the given ones."""
    layers, types = positive("num_hidden_layers", c.get("num_hidden_layers")), c.get("layer_types")
    if types is None:
        return None
    wrong = [repr(kind) for kind in types if kind not in kinds] if isinstance(types, list) else [repr(types)]
    if wrong or len(types) != layers:
        problem = wrong[0][:60] if wrong else f"{len(types)} layers"
        raise InputError(f"config.json: layer_types must be a list of {layers} layers, each {' or '.join(kinds)}, "
                         f"not {problem}")  # fmt: skip
    return types


def periodic(period: int, layers: int, *, others: str) -> list[str]:
    """Full attention in each layer whose number, counted from 1, is a multiple of the period; `others` elsewhere."""
    return [others if (i + 1) % period else FULL for i in range(layers)]


_SIZES = {"key_heads": "linear_num_key_heads", "heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
          "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim"}  # fmt: skip


def read_recurrent(c: Raw) -> RecurrentConfig:
    """The recurrent layers; raises InputError for values that are not supported."""
    positives(c, _SIZES.values())
    sizes = {ours: c[theirs] for ours, theirs in _SIZES.items()}
    if sizes["heads"] % sizes["key_heads"]:
        raise InputError(f"config.json: linear_num_key_heads={sizes['key_heads']} must divide "
                         f"linear_num_value_heads={sizes['heads']}")  # fmt: skip
    if sizes["taps"] < 2:
        raise InputError("config.json: linear_conv_kernel_dim=1 must be at least 2")
    return RecurrentConfig(layers=_layers(c), **sizes)


def _layers(c: Raw) -> tuple[int, ...]:
    types = read_layer_types(c, LINEAR, FULL)
    if types is None:
        period = positive("full_attention_interval", c["full_attention_interval"])
        types = periodic(period, c["num_hidden_layers"], others=LINEAR)
    if FULL not in types:
        raise InputError(f"config.json: layer_types has no {FULL}, so there is no cache to compress")
    return tuple(i for i, kind in enumerate(types) if kind == LINEAR)


def gemma4_layer_types(c: Raw) -> list[str]:
    """The kind of each layer. The last one has full attention, whatever the file says, as in transformers."""
    types = read_layer_types(c, FULL, SLIDING) or periodic(6, c["num_hidden_layers"], others=SLIDING)
    return [*types[:-1], FULL]


def full_heads(c: Raw, types: list[str]) -> dict[str, int]:
    """`head_dim` and `num_key_value_heads` of layers with full attention.

    The published files have fields for them, and those that transformers 5.24 writes have `per_layer_config`.
    """
    per_layer = c.get("per_layer_config")
    if per_layer is None:
        global_heads = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
        heads = c["num_key_value_heads"] if global_heads is None else global_heads
        return {"head_dim": c.get("global_head_dim", 512), "num_key_value_heads": heads}
    per_layer = per_layer if isinstance(per_layer, Mapping) else {}
    by_layer = {i: dict(part) if isinstance(part, Mapping) else {"": part} for i, part in per_layer.items()}
    parts = [by_layer.pop(str(i), by_layer.pop(f"{i:02}", {})) for i in range(len(types))]
    full = next((part for part, kind in zip(parts, types, strict=True) if kind == FULL), {})
    wanted = [full if kind == FULL else {} for kind in types]
    if by_layer or parts != wanted or not set(full) <= {"head_dim", "num_key_value_heads"}:
        raise InputError("config.json: per_layer_config must have head_dim and num_key_value_heads of the layers with "
                         "full attention, the same for all")  # fmt: skip
    return {name: full.get(name, c[name]) for name in ("head_dim", "num_key_value_heads")}


def gemma4_fields(c: Raw, types: list[str], width: int) -> dict[str, Any]:
    """Fields of `DecoderConfig`; `width` is that of the decoder."""
    require("use_bidirectional_attention", c.get("use_bidirectional_attention"), None, "vision")
    layers, shared = len(types), c.get("num_kv_shared_layers", 0)
    if not isinstance(shared, int) or not 0 <= shared < layers or set(types[: layers - shared]) != set(types):
        raise InputError(f"config.json: num_kv_shared_layers={shared!r} must leave layers of every kind with keys and "
                         "values of their own")  # fmt: skip
    heads = positive("num_key_value_heads", c["num_key_value_heads"]), positive("head_dim", c["head_dim"])
    if c["num_attention_heads"] % heads[0] or heads[1] % 2:
        raise InputError(f"config.json: num_key_value_heads={heads[0]} must divide the heads, and head_dim={heads[1]} "
                         "must be even")  # fmt: skip
    window, cap = positive("sliding_window", c["sliding_window"]), c.get("final_logit_softcapping")
    slides = SLIDING in types
    return dict(
        norm_offset=0.0, embedding_scale=width**0.5, query_scale=None, value_norm=True, layer_scale=True,
        key_is_value=bool(c.get("attention_k_eq_v")), layer_inputs=_layer_inputs(c), experts=_experts(c),
        logit_cap=None if cap is None else number("final_logit_softcapping", cap), shared_layers=shared,
        shared_mlp_width=2 * c["intermediate_size"] if c.get("use_double_wide_mlp") and shared else None,
        sliding_heads=heads if slides else None,
        windows=tuple(window if kind == SLIDING else None for kind in types) if slides else (),
    )  # fmt: skip


def _layer_inputs(c: Raw) -> LayerInputsConfig | None:
    width = c.get("hidden_size_per_layer_input", 256)
    if width == 0:
        return None
    rows = positive("vocab_size_per_layer_input", c.get("vocab_size_per_layer_input", 262144))
    pad = token_id(c, "pad_token_id", default=0)
    if rows < c["vocab_size"] or pad >= rows:
        raise InputError(f"config.json: vocab_size_per_layer_input={rows} must be at least vocab_size="
                         f"{c['vocab_size']} and exceed pad_token_id={pad}")  # fmt: skip
    return LayerInputsConfig(width=positive("hidden_size_per_layer_input", width), pad=pad, vocab_size=rows)


def _experts(c: Raw) -> ExpertsConfig | None:
    if not c.get("enable_moe_block"):
        return None
    positives(c, ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if c["top_k_experts"] > c["num_experts"]:
        raise InputError(f"config.json: top_k_experts={c['top_k_experts']} exceeds the number of experts, "
                         f"{c['num_experts']}")  # fmt: skip
    return ExpertsConfig(
        layers=tuple(range(c["num_hidden_layers"])), count=c["num_experts"], active=c["top_k_experts"],
        width=c["moe_intermediate_size"], normalised=True, beside=True, activation="gelu_pytorch_tanh",
    )  # fmt: skip
