"""Tensor names of InternVL: decoder, InternViT tower and projector, in transformers' and in the authors' form."""

from __future__ import annotations

from checkpoints_convert.entry import Fused, Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.text.weights import TRANSFORMERS_4, below, decoder

_TOWER: dict[str, Name] = {
    "class_token": Shaped("embeddings.cls_token", (1, 1, -1)), "patch": "embeddings.patch_embeddings.projection.weight",
    "patch_bias": "embeddings.patch_embeddings.projection.bias",
    "blocks.*.attention_norm": "encoder.layer.*.layernorm_before",
    "blocks.*.query": "encoder.layer.*.attention.q_proj", "blocks.*.key": "encoder.layer.*.attention.k_proj",
    "blocks.*.value": "encoder.layer.*.attention.v_proj", "blocks.*.query_norm": "encoder.layer.*.attention.q_norm",
    "blocks.*.key_norm": "encoder.layer.*.attention.k_norm",
    "blocks.*.out": "encoder.layer.*.attention.projection_layer",
    "blocks.*.attention_scale": "encoder.layer.*.lambda_1", "blocks.*.mlp_norm": "encoder.layer.*.layernorm_after",
    "blocks.*.up": "encoder.layer.*.mlp.fc1", "blocks.*.down": "encoder.layer.*.mlp.fc2",
    "blocks.*.mlp_scale": "encoder.layer.*.lambda_2",
}  # fmt: skip
_ORIGINAL_TOWER: dict[str, Name] = {
    "class_token": Shaped("embeddings.class_embedding", (1, 1, -1)), "patch": "embeddings.patch_embedding.weight",
    "patch_bias": "embeddings.patch_embedding.bias", "blocks.*.attention_norm": "encoder.layers.*.norm1",
    **{f"blocks.*.{name}": Fused("encoder.layers.*.attn.qkv") for name in ("query", "key", "value")},
    "blocks.*.query_norm": "encoder.layers.*.attn.q_norm", "blocks.*.key_norm": "encoder.layers.*.attn.k_norm",
    "blocks.*.out": "encoder.layers.*.attn.proj", "blocks.*.attention_scale": "encoder.layers.*.ls1",
    "blocks.*.mlp_norm": "encoder.layers.*.norm2", "blocks.*.up": "encoder.layers.*.mlp.fc1",
    "blocks.*.down": "encoder.layers.*.mlp.fc2", "blocks.*.mlp_scale": "encoder.layers.*.ls2",
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. The tower's layers after the feature layer and its mask token are unused."""
    c = config.vision
    position: Name = Shaped("embeddings.position_embeddings", (1, c.positions, -1))
    tower = below("vision.", "model.vision_tower.", {**_TOWER, "position.weight": position})
    projector = {"norm": "layer_norm", "first": "linear_1", "second": "linear_2"}
    return Names(
        ours=decoder(config, "model.language_model.") | tower
        | below("projector.", "model.multi_modal_projector.", {**projector}),
        renames=TRANSFORMERS_4, blocks=c.blocks,
        unused=r"^model\.vision_tower\.(?:embeddings\.mask_token$|encoder\.layer\.(\d+)\.)",
    )  # fmt: skip


def original_names(config: ModelConfig) -> Names:
    """The names of all parameters in the authors' form, where queries, keys and values are fused."""
    c = config.vision
    position: Name = Shaped("embeddings.position_embedding", (1, c.positions, -1))
    tower = below("vision.", "vision_model.", {**_ORIGINAL_TOWER, "position.weight": position})
    return Names(
        ours=decoder(config, "language_model.model.") | tower
        | below("projector.", "mlp1.", {"norm": "0", "first": "1", "second": "3"}),
        renames=((r"^language_model\.(?:lm_head|output)\.", "lm_head."),), blocks=c.blocks,
        unused=r"^vision_model\.encoder\.layers\.(\d+)\.",
    )  # fmt: skip
