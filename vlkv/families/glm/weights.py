"""Tensor names of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR: decoder, tower with fused projections, merger."""

from __future__ import annotations

from checkpoints_convert.entry import Name, Names
from vlkv.config import ModelConfig
from vlkv.families.qwen2_vl.weights import with_tower

_OWN: dict[str, Name] = {
    "vision.patch_norm": "post_conv_layernorm", "vision.positions": "embeddings.position_embedding",
    "vision.blocks.*.query_norm": "blocks.*.attn.q_norm", "vision.blocks.*.key_norm": "blocks.*.attn.k_norm",
    "projector.norm": "post_layernorm", "projector.downsample": "downsample", "projector.linear": "merger.proj",
    "projector.linear_norm": "merger.post_projection_norm",
    **{f"{ours}.{name}": f"{theirs}.{name}_proj" for name in ("gate", "up", "down")
       for ours, theirs in (("vision.blocks.*", "blocks.*.mlp"), ("projector", "merger"))},
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. The layers of GLM-OCR that predict further tokens are not needed."""
    ours = with_tower(config, _OWN)
    if config.family != "glm_ocr":
        return Names(ours=ours)
    return Names(ours=ours, unused=r"^model\.language_model\.layers\.(\d+)\.", blocks=config.decoder.layers)
