"""Reads which layers of a decoder are recurrent, and their sizes, from its part of a `config.json`."""

from __future__ import annotations

from vlkv.config import Raw, RecurrentConfig, positive, positives
from vlkv.errors import InputError
from vlkv.families.text.layer_types import FULL, LINEAR, periodic, read_layer_types

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
    types = read_layer_types(c, LINEAR, FULL)
    if types is None:
        period = positive("full_attention_interval", c["full_attention_interval"])
        types = periodic(period, c["num_hidden_layers"], others=LINEAR)
    if FULL not in types:
        raise InputError(f"config.json: layer_types has no {FULL}, so there is no cache to compress")
    return tuple(i for i, kind in enumerate(types) if kind == LINEAR)
