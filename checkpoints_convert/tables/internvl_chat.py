"""InternVL2 and InternVL-Chat-V1.5 as published: decoder, InternViT with fused queries, keys and values, projector."""

from __future__ import annotations

import re
from collections.abc import Iterator

from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry, affine, rows
from vlkv.config import InternVitConfig, ModelConfig

RENAMES = ((r"^language_model\.(?:lm_head|output)\.", "lm_head."),)
_LAYER = re.compile(r"^vision_model\.encoder\.layers\.(\d+)\.")


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    assert isinstance(config.vision, InternVitConfig)
    yield from decoder(config.decoder, "language_model.model.")
    yield from _tower(config.vision, "vision_model.")
    d, width = config.decoder.width, config.vision.width * config.wiring.merge**2
    yield from affine("mlp1.0", "projector.norm", (width,))
    yield from affine("mlp1.1", "projector.first", (d, width))
    yield from affine("mlp1.3", "projector.second", (d, d))


def ignored(key: str, config: ModelConfig) -> bool:
    """Tower layers behind the feature layer."""
    match = _LAYER.match(key)
    if match is None or not isinstance(config.vision, InternVitConfig):
        return False
    return config.vision.blocks <= int(match[1]) < config.vision.layers


def _tower(c: InternVitConfig, prefix: str) -> Iterator[Entry]:
    """All tensors of a tower up to its feature layer."""
    d, f, p = c.width, c.mlp_width, c.patch_size
    yield Entry(prefix + "embeddings.class_embedding", "vision.class_token", (1, 1, d))
    yield Entry(prefix + "embeddings.patch_embedding.weight", "vision.patch", (d, 3, p, p))
    yield Entry(prefix + "embeddings.patch_embedding.bias", "vision.patch_bias", (d,))
    yield Entry(prefix + "embeddings.position_embedding", "vision.position.weight", (1, c.grid**2 + 1, d))
    for i in range(c.blocks):
        key, path = f"{prefix}encoder.layers.{i}.", f"vision.blocks.{i}."
        for name, ours in (("norm1", "attention_norm"), ("norm2", "mlp_norm")):
            entries = list(affine(key + name, path + ours, (d,)))
            yield from entries if c.norm == "layer_norm" else entries[:1]
        for third, ours in enumerate(("query", "key", "value")):
            yield rows(key + "attn.qkv.weight", f"{path}{ours}.weight", (3 * d, d), third * d, d)
            if c.qkv_bias:
                yield rows(key + "attn.qkv.bias", f"{path}{ours}.bias", (3 * d,), third * d, d)
        if c.qk_norm_eps is not None:
            yield Entry(key + "attn.q_norm.weight", path + "query_norm.weight", (d,))
            yield Entry(key + "attn.k_norm.weight", path + "key_norm.weight", (d,))
        yield from affine(key + "attn.proj", path + "out", (d, d))
        yield Entry(key + "ls1", path + "attention_scale", (d,))
        yield from affine(key + "mlp.fc1", path + "up", (f, d))
        yield from affine(key + "mlp.fc2", path + "down", (d, f))
        yield Entry(key + "ls2", path + "mlp_scale", (d,))
