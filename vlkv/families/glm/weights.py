"""Tensor names of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR: decoder, tower with fused projections, merger."""

from __future__ import annotations

from checkpoints_convert.entry import Fused, Name, Names, Shaped
from vlkv.config import ModelConfig
from vlkv.families.text.weights import below, decoder

_TOWER: dict[str, Name] = {
    "vision.patch.bias": "patch_embed.proj.bias", "vision.patch_norm": "post_conv_layernorm",
    "vision.positions": "embeddings.position_embedding",
    "vision.blocks.*.attention_norm": "blocks.*.norm1", "vision.blocks.*.out": "blocks.*.attn.proj",
    **{f"vision.blocks.*.{name}": Fused("blocks.*.attn.qkv") for name in ("query", "key", "value")},
    "vision.blocks.*.query_norm": "blocks.*.attn.q_norm", "vision.blocks.*.key_norm": "blocks.*.attn.k_norm",
    "vision.blocks.*.mlp_norm": "blocks.*.norm2",
    **{f"vision.blocks.*.{name}": f"blocks.*.mlp.{name}_proj" for name in ("gate", "up", "down")},
    "projector.norm": "post_layernorm", "projector.downsample": "downsample", "projector.linear": "merger.proj",
    "projector.linear_norm": "merger.post_projection_norm",
    **{f"projector.{name}": f"merger.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


def names(config: ModelConfig) -> Names:
    """The names of all parameters. The layers of GLM-OCR that predict further tokens are not needed."""
    c = config.vision
    patch = Shaped("patch_embed.proj.weight", (-1, 3, c.frames, c.patch_size, c.patch_size))
    ours = decoder(config, "model.language_model.") | below(
        "", "model.visual.", _TOWER | {"vision.patch.weight": patch}
    )
    if config.family != "glm_ocr":
        return Names(ours=ours)
    return Names(ours=ours, unused=r"^model\.language_model\.layers\.(\d+)\.", blocks=config.decoder.layers)
