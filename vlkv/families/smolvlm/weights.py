"""Tensor names of SmolVLM and Idefics3, which are the same in all versions of transformers."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below, decoder

# SigLIP with its last norm.
TOWER: dict[str, Name] = {
    "patch": "embeddings.patch_embedding.weight", "patch_bias": "embeddings.patch_embedding.bias",
    "position": "embeddings.position_embedding", "last_norm": "post_layernorm",
    "blocks.*.attention_norm": "encoder.layers.*.layer_norm1", "blocks.*.query": "encoder.layers.*.self_attn.q_proj",
    "blocks.*.key": "encoder.layers.*.self_attn.k_proj", "blocks.*.value": "encoder.layers.*.self_attn.v_proj",
    "blocks.*.out": "encoder.layers.*.self_attn.out_proj", "blocks.*.mlp_norm": "encoder.layers.*.layer_norm2",
    "blocks.*.up": "encoder.layers.*.mlp.fc1", "blocks.*.down": "encoder.layers.*.mlp.fc2",
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters."""
    tower = below("vision.", "model.vision_model.", TOWER)
    projector: dict[str, Name] = {"projector": "model.connector.modality_projection.proj"}
    return Names(ours=decoder(config, "model.text_model.") | tower | projector)
