"""Tensor names of Qwen2-VL and Qwen2.5-VL: decoder, tower with fused projections, merger."""

from __future__ import annotations

from checkpoints_convert.entry import Fused, Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below, decoder

_TOWER: dict[str, Name] = {
    "vision.blocks.*.attention_norm": "blocks.*.norm1", "vision.blocks.*.out": "blocks.*.attn.proj",
    **{f"vision.blocks.*.{name}": Fused("blocks.*.attn.qkv") for name in ("query", "key", "value")},
    "vision.blocks.*.mlp_norm": "blocks.*.norm2", "vision.blocks.*.gate": "blocks.*.mlp.gate_proj",
    "projector.norm": "merger.ln_q", "projector.first": "merger.mlp.0", "projector.second": "merger.mlp.2",
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    c = config.vision
    up, down = ("up_proj", "down_proj") if c.gated else ("fc1", "fc2")
    more: dict[str, Name] = {
        "vision.patch.weight": Shaped("patch_embed.proj.weight", (-1, 3, c.frames, c.patch_size, c.patch_size)),
        "vision.blocks.*.up": f"blocks.*.mlp.{up}", "vision.blocks.*.down": f"blocks.*.mlp.{down}",
    }  # fmt: skip
    return Names(
        ours=decoder(config, "model.language_model.") | below("", "model.visual.", _TOWER | more),
        renames=((r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
                 (r"^visual\.", "model.visual.")),
        unused=r"^model\.visual\.rotary_pos_emb\.inv_freq$",
    )  # fmt: skip
