"""Qwen2-VL and Qwen2.5-VL: decoder, tower with fused projections, merger."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints_convert.tables.decoder import decoder
from checkpoints_convert.tables.entry import Entry, affine, rows
from vlkv.config import ModelConfig, QwenVisionConfig

RENAMES = (
    (r"^model\.(embed_tokens|layers|norm)\.", r"model.language_model.\1."),
    (r"^visual\.", "model.visual."),
)


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    assert isinstance(config.vision, QwenVisionConfig)
    yield from decoder(config.decoder, "model.language_model.")
    yield from _tower(config.vision, "model.visual.")
    yield from _merger(config.vision, "model.visual.merger.")


def ignored(key: str, config: ModelConfig) -> bool:
    """The tower's table of frequencies."""
    del config
    return key == "model.visual.rotary_pos_emb.inv_freq"


def _tower(c: QwenVisionConfig, prefix: str) -> Iterator[Entry]:
    d, f, p = c.width, c.mlp_width, c.patch_size
    yield Entry(prefix + "patch_embed.proj.weight", "vision.patch.weight", (d, 3, c.frames, p, p))
    for i in range(c.layers):
        key, path = f"{prefix}blocks.{i}.", f"vision.blocks.{i}."
        yield from _norm(c, key + "norm1", path + "attention_norm")
        for third, ours in enumerate(("query", "key", "value")):
            for name, shape in (("weight", (3 * d, d)), ("bias", (3 * d,))):
                yield rows(f"{key}attn.qkv.{name}", f"{path}{ours}.{name}", shape, third * d, d)
        yield from affine(key + "attn.proj", path + "out", (d, d))
        yield from _norm(c, key + "norm2", path + "mlp_norm")
        if c.gated:
            yield from affine(key + "mlp.gate_proj", path + "gate", (f, d))
        yield from affine(key + ("mlp.up_proj" if c.gated else "mlp.fc1"), path + "up", (f, d))
        yield from affine(key + ("mlp.down_proj" if c.gated else "mlp.fc2"), path + "down", (d, f))


def _merger(c: QwenVisionConfig, prefix: str) -> Iterator[Entry]:
    width = c.width * c.merge**2
    yield from _norm(c, prefix + "ln_q", "merger.norm")
    yield from affine(prefix + "mlp.0", "merger.first", (width, width))
    yield from affine(prefix + "mlp.2", "merger.second", (c.out_width, width))


def _norm(c: QwenVisionConfig, key: str, path: str) -> list[Entry]:
    entries = list(affine(key, path, (c.width,)))
    return entries[:1] if c.gated else entries
