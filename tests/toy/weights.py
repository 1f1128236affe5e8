"""Checkpoint names that differ from those of other families; some tensors are fused."""

from checkpoints_convert.entry import Fused, Names
from vlkv.families.names import below, decoder

TOWER: dict[str, str | Fused] = {
    "patch": "patches", "class_token": "class", "position": "places", "first_norm": "norm",
    "blocks.*.attention_norm": "*.norm1", "blocks.*.out": "*.out", "blocks.*.mlp_norm": "*.norm2",
    "blocks.*.up": "*.up", "blocks.*.down": "*.down",
    **{f"blocks.*.{name}": Fused("*.qkv") for name in ("query", "key", "value")},
}  # fmt: skip


def names(config):
    joined = below("vision.", "eyes.", TOWER) | below("projector.", "bridge.", {"first": "0", "second": "1"})
    return Names(ours=decoder(config, "mouth.") | joined)
