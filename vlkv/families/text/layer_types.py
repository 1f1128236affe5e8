"""Names of the kinds of layers in a `config.json`, and its field `layer_types`."""

from __future__ import annotations

from vlkv.config import Raw, positive
from vlkv.errors import InputError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def read_layer_types(c: Raw, *kinds: str) -> list[str] | None:
    """The kind of each layer; None if the field is missing. Raises InputError for other kinds than the given ones."""
    layers, types = positive("num_hidden_layers", c.get("num_hidden_layers")), c.get("layer_types")
    if types is None:
        return None
    wrong = [repr(kind) for kind in types if kind not in kinds] if isinstance(types, list) else [repr(types)]
    if wrong or len(types) != layers:
        found = wrong[0][:60] if wrong else f"{len(types)} layers"
        raise InputError(f"config.json: layer_types must be a list of {layers} layers, each {' or '.join(kinds)}, "
                         f"not {found}")  # fmt: skip
    return types


def periodic(period: int, layers: int, *, others: str) -> list[str]:
    """Full attention in each layer whose number, counted from 1, is a multiple of the period; `others` elsewhere."""
    return [others if (i + 1) % period else FULL for i in range(layers)]
