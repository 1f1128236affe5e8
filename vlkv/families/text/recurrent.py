"""Reads which layers of a decoder are recurrent, and their sizes, from its part of a `config.json`."""

from __future__ import annotations

from vlkv.config import Raw, RecurrentConfig, positive, positives
from vlkv.errors import InputError

_LINEAR, _FULL = "linear_attention", "full_attention"
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
    """Indices of the recurrent layers."""
    layers, types = c["num_hidden_layers"], c.get("layer_types")
    if types is None:
        every = positive("full_attention_interval", c["full_attention_interval"])
        types = [_LINEAR if (i + 1) % every else _FULL for i in range(layers)]
    if not (isinstance(types, list) and len(types) == layers and all(kind in (_LINEAR, _FULL) for kind in types)):
        raise InputError(f"config.json: layer_types={types!r} must be a list of {layers} layers, each {_LINEAR} or "
                         f"{_FULL}")  # fmt: skip
    if _FULL not in types:
        raise InputError(f"config.json: layer_types has no {_FULL}, so there is no cache to compress")
    return tuple(i for i, kind in enumerate(types) if kind == _LINEAR)
