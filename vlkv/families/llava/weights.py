"""Tensor names of LLaVA-1.5 in transformers' form: decoder, CLIP tower, projector."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.text.weights import TRANSFORMERS_4, below, decoder

RENAMES = (*TRANSFORMERS_4, (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."))
_UNUSED = r"^model\.vision_tower\.(?:post_layernorm\.|head\.|encoder\.layers\.(\d+)\.)"
# Names of CLIP and SigLIP, which have different parts of them.
TOWER: dict[str, Name] = {
    "patch": "embeddings.patch_embedding.weight", "patch_bias": "embeddings.patch_embedding.bias",
    "class_token": "embeddings.class_embedding", "position": "embeddings.position_embedding",
    "first_norm": "pre_layrnorm", "last_norm": "post_layernorm",
    "blocks.*.attention_norm": "encoder.layers.*.layer_norm1", "blocks.*.mlp_norm": "encoder.layers.*.layer_norm2",
    **{f"blocks.*.{ours}": f"encoder.layers.*.self_attn.{theirs}_proj"
       for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "out"))},
    "blocks.*.up": "encoder.layers.*.mlp.fc1", "blocks.*.down": "encoder.layers.*.mlp.fc2",
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. The tower's layers after the feature layer are unused."""
    vision = below("vision.", "model.vision_tower.", TOWER)
    projector = below("projector.", "model.multi_modal_projector.", {"first": "linear_1", "second": "linear_2"})
    ours = decoder(config, "model.language_model.") | vision | projector
    return Names(ours=ours, renames=RENAMES, unused=_UNUSED, blocks=config.vision.blocks)
