"""LLaVA-1.5's tensors, under transformers' names: decoder, CLIP tower, projector."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.text.weights import TRANSFORMERS_4, below, decoder

RENAMES = (*TRANSFORMERS_4, (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."))
UNUSED = r"^model\.vision_tower\.(?:post_layernorm\.|head\.|encoder\.layers\.(\d+)\.)"
# CLIP and SigLIP, which has fewer of them.
_TOWER: dict[str, Name] = {
    "patch": "embeddings.patch_embedding.weight", "patch_bias": "embeddings.patch_embedding.bias",
    "class_token": "embeddings.class_embedding", "position": "embeddings.position_embedding",
    "first_norm": "pre_layrnorm", "blocks.*.attention_norm": "encoder.layers.*.layer_norm1",
    "blocks.*.query": "encoder.layers.*.self_attn.q_proj", "blocks.*.key": "encoder.layers.*.self_attn.k_proj",
    "blocks.*.value": "encoder.layers.*.self_attn.v_proj", "blocks.*.out": "encoder.layers.*.self_attn.out_proj",
    "blocks.*.mlp_norm": "encoder.layers.*.layer_norm2", "blocks.*.up": "encoder.layers.*.mlp.fc1",
    "blocks.*.down": "encoder.layers.*.mlp.fc2",
}  # fmt: skip
_PROJECTOR: dict[str, Name] = {"first": "linear_1", "second": "linear_2"}


def ours(config: ModelConfig) -> dict[str, Name]:
    """Names of everything that all LLaVAs have."""
    tower = below("vision.", "model.vision_tower.", _TOWER)
    return (
        decoder(config, "model.language_model.")
        | tower
        | below("projector.", "model.multi_modal_projector.", _PROJECTOR)
    )


def names(config: ModelConfig) -> Names:
    """All tensors, and those behind the feature layer, which are not needed."""
    return Names(ours=ours(config), renames=RENAMES, unused=UNUSED, blocks=config.vision.blocks)
