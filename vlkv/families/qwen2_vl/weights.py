"""Tensor names of Qwen2-VL and Qwen2.5-VL: decoder, tower with fused projections, merger."""

from __future__ import annotations

from collections.abc import Mapping

from checkpoints_convert.entry import Fused, Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.text.weights import Ours, below, decoder

# Names that the towers of Qwen2-VL, Qwen3-VL and GLM share.
_TOWER: dict[str, Name] = {
    "vision.patch.bias": "patch_embed.proj.bias",
    "vision.blocks.*.attention_norm": "blocks.*.norm1", "vision.blocks.*.out": "blocks.*.attn.proj",
    **{f"vision.blocks.*.{name}": Fused("blocks.*.attn.qkv") for name in ("query", "key", "value")},
    "vision.blocks.*.mlp_norm": "blocks.*.norm2",
}  # fmt: skip
_OWN: dict[str, Name] = {
    "vision.blocks.*.gate": "blocks.*.mlp.gate_proj", "projector.norm": "merger.ln_q",
    "projector.first": "merger.mlp.0", "projector.second": "merger.mlp.2",
}  # fmt: skip
RENAMES = ((r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."), (r"^visual\.", "model.visual."))


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    up, down = ("up_proj", "down_proj") if config.vision.gated else ("fc1", "fc2")
    own = _OWN | {"vision.blocks.*.up": f"blocks.*.mlp.{up}", "vision.blocks.*.down": f"blocks.*.mlp.{down}"}
    unused = r"^model\.visual\.rotary_pos_emb\.inv_freq$"
    return Names(ours=with_tower(config, own), renames=RENAMES, unused=unused)


def with_tower(config: ModelConfig, own: Mapping[str, Name]) -> Ours:
    """The names of the decoder and of a tower with the further names `own`, which are those below `model.visual.`."""
    c = config.vision
    patch = Shaped("patch_embed.proj.weight", (-1, 3, c.frames, c.patch_size, c.patch_size))
    visual = below("", "model.visual.", {**_TOWER, "vision.patch.weight": patch, **own})
    return decoder(config, "model.language_model.") | visual
