"""Which tensor of a checkpoint is which of our parameters: one table per family, checked as a whole.

Checkpoints on disk use two generations of names (transformers 4 and 5; version 5 still saves the old ones). Keys are
first brought to the new names by regular expression, then looked up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from vlkv.config import TEXT_FAMILIES, ClipConfig, DecoderConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: its name on disk (new style), our parameter's path, and its shape on disk."""

    key: str
    path: str
    shape: tuple[int, ...]


_RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "llava": (
        (r"^language_model\.model\.", "model.language_model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
        (r"^model\.vision_tower\.vision_model\.", "model.vision_tower."),
    ),
    **dict.fromkeys(TEXT_FAMILIES, ()),
}
# Buffers that old checkpoints carry and nobody needs.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|position_ids)$")
_UNUSED_VISION = re.compile(r"^model\.vision_tower\.(?:post_layernorm\.|encoder\.layers\.(\d+)\.)")


def canonical(key: str, family: str) -> str:
    """The new-style name of a key found on disk."""
    for pattern, replacement in _RENAMES[family]:
        key = re.sub(pattern, replacement, key)
    return key


def ignored(key: str, config: ModelConfig) -> bool:
    """Whether a (new-style) key is known but unused: buffers, and tower layers behind the feature layer."""
    if _BUFFERS.search(key):
        return True
    match = _UNUSED_VISION.match(key)
    if match is None or config.vision is None:
        return False
    return match[1] is None or config.vision.blocks <= int(match[1]) < config.vision.layers


def table(config: ModelConfig) -> list[Entry]:
    """All tensors that a model of this config needs."""
    if config.vision is None:
        return list(_decoder(config.decoder, "model."))
    return [
        *_decoder(config.decoder, "model.language_model."),
        *_clip(config.vision, "model.vision_tower."),
        *_projector(config, "model.multi_modal_projector."),
    ]


def _decoder(c: DecoderConfig, prefix: str) -> Iterator[Entry]:
    d, f, q, kv = c.width, c.mlp_width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield Entry(prefix + "embed_tokens.weight", "decoder.embedding.weight", (c.vocab_size, d))
    for i in range(c.layers):
        key, path = f"{prefix}layers.{i}.", f"decoder.layers.{i}."
        yield Entry(key + "input_layernorm.weight", path + "attention_norm.weight", (d,))
        for name, ours, width in (("q", "query", q), ("k", "key", kv), ("v", "value", kv)):
            yield Entry(f"{key}self_attn.{name}_proj.weight", f"{path}{ours}.weight", (width, d))
            if c.qkv_bias:
                yield Entry(f"{key}self_attn.{name}_proj.bias", f"{path}{ours}.bias", (width,))
        yield Entry(key + "self_attn.o_proj.weight", path + "out.weight", (d, q))
        if c.out_bias:
            yield Entry(key + "self_attn.o_proj.bias", path + "out.bias", (d,))
        yield Entry(key + "post_attention_layernorm.weight", path + "mlp_norm.weight", (d,))
        yield Entry(key + "mlp.gate_proj.weight", path + "gate.weight", (f, d))
        yield Entry(key + "mlp.up_proj.weight", path + "up.weight", (f, d))
        yield Entry(key + "mlp.down_proj.weight", path + "down.weight", (d, f))
    yield Entry(prefix + "norm.weight", "decoder.norm.weight", (d,))
    if not c.tied:
        yield Entry("lm_head.weight", "decoder.head.weight", (c.vocab_size, d))


def _clip(c: ClipConfig, prefix: str) -> Iterator[Entry]:
    d, f = c.width, c.mlp_width
    yield Entry(prefix + "embeddings.class_embedding", "vision.class_token", (d,))
    yield Entry(prefix + "embeddings.patch_embedding.weight", "vision.patch", (d, 3, c.patch_size, c.patch_size))
    yield Entry(prefix + "embeddings.position_embedding.weight", "vision.position.weight", (c.grid**2 + 1, d))
    yield from _affine(prefix + "pre_layrnorm", "vision.first_norm", (d,))
    for i in range(c.blocks):
        key, path = f"{prefix}encoder.layers.{i}.", f"vision.blocks.{i}."
        yield from _affine(key + "layer_norm1", path + "attention_norm", (d,))
        for name, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "out")):
            yield from _affine(f"{key}self_attn.{name}", path + ours, (d, d))
        yield from _affine(key + "layer_norm2", path + "mlp_norm", (d,))
        yield from _affine(key + "mlp.fc1", path + "up", (f, d))
        yield from _affine(key + "mlp.fc2", path + "down", (d, f))


def _projector(config: ModelConfig, prefix: str) -> Iterator[Entry]:
    assert config.vision is not None
    d = config.decoder.width
    for name, ours, width_in in (("linear_1", "first", config.vision.width), ("linear_2", "second", d)):
        entries = list(_affine(prefix + name, "projector." + ours, (d, width_in)))
        yield from entries if config.projector_bias else entries[:1]


def _affine(key: str, path: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    yield Entry(key + ".weight", path + ".weight", shape)
    yield Entry(key + ".bias", path + ".bias", shape[:1])
