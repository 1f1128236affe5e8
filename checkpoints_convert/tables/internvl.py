"""InternVL2.5 and 3 in transformers' form: decoder, InternViT tower, projector."""

from __future__ import annotations

import re
from collections.abc import Iterator

from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry, affine
from vlkv.config import InternVitConfig, ModelConfig

RENAMES = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
)
_UNUSED = re.compile(r"^model\.vision_tower\.(?:embeddings\.mask_token$|encoder\.layer\.(\d+)\.)")


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    assert isinstance(config.vision, InternVitConfig)
    yield from decoder(config.decoder, "model.language_model.")
    yield from _tower(config.vision, "model.vision_tower.")
    d, width = config.decoder.width, config.vision.width * config.wiring.merge**2
    prefix = "model.multi_modal_projector."
    yield from affine(prefix + "layer_norm", "projector.norm", (width,))
    yield from affine(prefix + "linear_1", "projector.first", (d, width))
    yield from affine(prefix + "linear_2", "projector.second", (d, d))


def ignored(key: str, config: ModelConfig) -> bool:
    """Tower layers behind the feature layer, and the token that masks patches in training."""
    match = _UNUSED.match(key)
    if match is None or not isinstance(config.vision, InternVitConfig):
        return False
    return match[1] is None or config.vision.blocks <= int(match[1]) < config.vision.layers


def _tower(c: InternVitConfig, prefix: str) -> Iterator[Entry]:
    """All tensors of a tower up to its feature layer."""
    d, f, p = c.width, c.mlp_width, c.patch_size
    yield Entry(prefix + "embeddings.cls_token", "vision.class_token", (1, 1, d))
    yield Entry(prefix + "embeddings.patch_embeddings.projection.weight", "vision.patch", (d, 3, p, p))
    yield Entry(prefix + "embeddings.patch_embeddings.projection.bias", "vision.patch_bias", (d,))
    yield Entry(prefix + "embeddings.position_embeddings", "vision.position.weight", (1, c.grid**2 + 1, d))
    normed = affine if c.norm == "layer_norm" else _weight
    for i in range(c.blocks):
        key, path = f"{prefix}encoder.layer.{i}.", f"vision.blocks.{i}."
        yield from normed(key + "layernorm_before", path + "attention_norm", (d,))
        for name, ours in (("q", "query"), ("k", "key"), ("v", "value")):
            yield from (affine if c.qkv_bias else _weight)(f"{key}attention.{name}_proj", path + ours, (d, d))
        if c.qk_norm_eps is not None:
            yield from _weight(key + "attention.q_norm", path + "query_norm", (d,))
            yield from _weight(key + "attention.k_norm", path + "key_norm", (d,))
        yield from affine(key + "attention.projection_layer", path + "out", (d, d))
        yield Entry(key + "lambda_1", path + "attention_scale", (d,))
        yield from normed(key + "layernorm_after", path + "mlp_norm", (d,))
        yield from affine(key + "mlp.fc1", path + "up", (f, d))
        yield from affine(key + "mlp.fc2", path + "down", (d, f))
        yield Entry(key + "lambda_2", path + "mlp_scale", (d,))


def _weight(key: str, path: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    yield Entry(key + ".weight", path + ".weight", shape)
