"""Tensor names of PaddleOCR-VL: decoder, SigLIP tower, projector; in the form of transformers 5 or of the authors."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below, decoder

_TOWER: dict[str, Name] = {
    "patch.bias": "embeddings.patch_embedding.bias", "positions": "embeddings.position_embedding",
    "norm": "post_layernorm", "blocks.*.attention_norm": "encoder.layers.*.layer_norm1",
    "blocks.*.query": "encoder.layers.*.self_attn.q_proj", "blocks.*.key": "encoder.layers.*.self_attn.k_proj",
    "blocks.*.value": "encoder.layers.*.self_attn.v_proj", "blocks.*.out": "encoder.layers.*.self_attn.out_proj",
    "blocks.*.mlp_norm": "encoder.layers.*.layer_norm2", "blocks.*.up": "encoder.layers.*.mlp.fc1",
    "blocks.*.down": "encoder.layers.*.mlp.fc2",
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. SigLIP's pooling head and another table of positions are published and unused."""
    side = config.vision.patch_size
    patch: Name = Shaped("embeddings.patch_embedding.weight", (-1, 3, side, side))
    projector: dict[str, Name] = {"norm": "pre_norm", "first": "linear_1", "second": "linear_2"}
    return Names(
        ours=decoder(config, "model.language_model.")
        | below("vision.", "model.visual.vision_model.", {**_TOWER, "patch.weight": patch})
        | below("projector.", "model.projector.", projector),
        renames=((r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
                 (r"^visual\.", "model.visual."), (r"^mlp_AR\.", "model.projector.")),
        unused=r"^model\.visual\.vision_model\.(?:head|embeddings\.packing_position_embedding)\.",
    )  # fmt: skip
