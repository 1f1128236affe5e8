"""LLaVA-1.5: decoder, CLIP tower, projector."""

from __future__ import annotations

import re
from collections.abc import Iterator

from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry, affine
from vlkv.config import ClipConfig, ModelConfig, SiglipConfig

RENAMES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
    (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
)
_UNUSED = re.compile(r"^model\.vision_tower\.(?:post_layernorm\.|encoder\.layers\.(\d+)\.)")


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    assert isinstance(config.vision, ClipConfig)
    yield from decoder(config.decoder, "model.language_model.")
    yield from tower(config.vision, "model.vision_tower.")
    yield from projector(config, "model.multi_modal_projector.")


def ignored(key: str, config: ModelConfig) -> bool:
    """Tower layers behind the feature layer, and the norm after them."""
    match = _UNUSED.match(key)
    if match is None or not isinstance(config.vision, ClipConfig):
        return False
    return match[1] is None or config.vision.blocks <= int(match[1]) < config.vision.layers


def tower(c: ClipConfig, prefix: str) -> Iterator[Entry]:
    """All tensors of a CLIP tower up to its feature layer."""
    d = c.width
    yield Entry(prefix + "embeddings.class_embedding", "vision.class_token", (d,))
    yield Entry(prefix + "embeddings.patch_embedding.weight", "vision.patch", (d, 3, c.patch_size, c.patch_size))
    yield Entry(prefix + "embeddings.position_embedding.weight", "vision.position.weight", (c.grid**2 + 1, d))
    yield from affine(prefix + "pre_layrnorm", "vision.first_norm", (d,))
    yield from blocks(c, prefix)


def blocks(c: ClipConfig | SiglipConfig, prefix: str) -> Iterator[Entry]:
    """The blocks of a tower, which CLIP and SigLIP name alike."""
    d, f = c.width, c.mlp_width
    for i in range(c.blocks):
        key, path = f"{prefix}encoder.layers.{i}.", f"vision.blocks.{i}."
        yield from affine(key + "layer_norm1", path + "attention_norm", (d,))
        for name, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out")):
            yield from affine(f"{key}self_attn.{name}", path + ours, (d, d))
        yield from affine(key + "layer_norm2", path + "mlp_norm", (d,))
        yield from affine(key + "mlp.fc1", path + "up", (f, d))
        yield from affine(key + "mlp.fc2", path + "down", (d, f))


def projector(config: ModelConfig, prefix: str) -> Iterator[Entry]:
    """The two linear maps."""
    assert config.vision is not None
    d = config.decoder.width
    for name, ours, width_in in (("linear_1", "first", config.vision.width), ("linear_2", "second", d)):
        entries = list(affine(prefix + name, "projector." + ours, (d, width_in)))
        yield from entries if config.projector_bias else entries[:1]
