"""Tensor names of Qwen3-VL: decoder, tower with fused projections, mergers."""

from __future__ import annotations

from checkpoints_convert.entry import Fused, Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below, decoder

_TOWER: dict[str, Name] = {
    "vision.patch.bias": "patch_embed.proj.bias", "vision.positions": "pos_embed",
    "vision.blocks.*.attention_norm": "blocks.*.norm1", "vision.blocks.*.out": "blocks.*.attn.proj",
    **{f"vision.blocks.*.{name}": Fused("blocks.*.attn.qkv") for name in ("query", "key", "value")},
    "vision.blocks.*.mlp_norm": "blocks.*.norm2", "vision.blocks.*.up": "blocks.*.mlp.linear_fc1",
    "vision.blocks.*.down": "blocks.*.mlp.linear_fc2",
    **{f"{ours}.{part}": f"{theirs}.{name}"
       for ours, theirs in (("projector", "merger"), ("deep.*", "deepstack_merger_list.*"))
       for part, name in (("norm", "norm"), ("first", "linear_fc1"), ("second", "linear_fc2"))},
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    c = config.vision
    patch = Shaped("patch_embed.proj.weight", (-1, 3, c.frames, c.patch_size, c.patch_size))
    more: dict[str, Name] = {"vision.patch.weight": patch}
    return Names(
        ours=decoder(config, "model.language_model.") | below("", "model.visual.", _TOWER | more),
        renames=((r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
                 (r"^visual\.", "model.visual.")),
    )  # fmt: skip
