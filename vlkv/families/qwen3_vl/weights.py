"""Tensor names of Qwen3-VL: those of Qwen2-VL, with another MLP, a table of positions and several mergers."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.qwen2_vl.weights import RENAMES, with_tower

_OWN: dict[str, Name] = {
    "vision.positions": "pos_embed", "vision.blocks.*.up": "blocks.*.mlp.linear_fc1",
    "vision.blocks.*.down": "blocks.*.mlp.linear_fc2",
    **{f"{ours}.{part}": f"{theirs}.{name}"
       for ours, theirs in (("projector", "merger"), ("deep.*", "deepstack_merger_list.*"))
       for part, name in (("norm", "norm"), ("first", "linear_fc1"), ("second", "linear_fc2"))},
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    return Names(ours=with_tower(config, _OWN), renames=RENAMES)
