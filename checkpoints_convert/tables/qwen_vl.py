"""Qwen-VL: fused projections, thirds in the decoder and the resampler, head by head in the tower."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints_convert.tables.entry import Entry, Part, affine, rows
from vlkv.config import DecoderConfig, ModelConfig, QwenVitConfig

RENAMES = ()
_QKV = ("query", "key", "value")


def table(config: ModelConfig) -> Iterator[Entry]:
    """All tensors that a model of this config needs."""
    assert isinstance(config.vision, QwenVitConfig)
    yield from _decoder(config.decoder, "transformer.")
    yield from _tower(config.vision, config.decoder.width, "transformer.visual.")
    yield from _resampler(config.vision, config.decoder.width, "transformer.visual.attn_pool.")


def ignored(key: str, config: ModelConfig) -> bool:
    """Nothing."""
    del key, config
    return False


def _decoder(c: DecoderConfig, prefix: str) -> Iterator[Entry]:
    d, f, q = c.width, c.mlp_width, c.heads * c.head_dim
    yield Entry(prefix + "wte.weight", "decoder.embedding.weight", (c.vocab_size, d))
    for i in range(c.layers):
        key, path = f"{prefix}h.{i}.", f"decoder.layers.{i}."
        yield Entry(key + "ln_1.weight", path + "attention_norm.weight", (d,))
        yield from _thirds(key + "attn.c_attn.weight", path, ".weight", (3 * q, d))
        yield from _thirds(key + "attn.c_attn.bias", path, ".bias", (3 * q,))
        yield Entry(key + "attn.c_proj.weight", path + "out.weight", (d, q))
        yield Entry(key + "ln_2.weight", path + "mlp_norm.weight", (d,))
        yield Entry(key + "mlp.w2.weight", path + "gate.weight", (f, d))
        yield Entry(key + "mlp.w1.weight", path + "up.weight", (f, d))
        yield Entry(key + "mlp.c_proj.weight", path + "down.weight", (d, f))
    yield Entry(prefix + "ln_f.weight", "decoder.norm.weight", (d,))
    if not c.tied:
        yield Entry("lm_head.weight", "decoder.head.weight", (c.vocab_size, d))


def _tower(c: QwenVitConfig, width: int, prefix: str) -> Iterator[Entry]:
    d, f = c.width, c.mlp_width
    yield Entry(prefix + "conv1.weight", "vision.patch", (d, 3, c.patch_size, c.patch_size))
    yield Entry(prefix + "positional_embedding", "vision.position", (256, d))
    yield from affine(prefix + "ln_pre", "vision.first_norm", (d,))
    for i in range(c.layers):
        key, path = f"{prefix}transformer.resblocks.{i}.", f"vision.blocks.{i}."
        yield from affine(key + "ln_1", path + "attention_norm", (d,))
        view = (c.heads, 3, d // c.heads)
        for place, ours in enumerate(_QKV):
            take = (slice(None), slice(place, place + 1))
            yield Entry(key + "attn.in_proj.weight", f"{path}{ours}.weight", (3 * d, d), Part((*view, d), take))
            yield Entry(key + "attn.in_proj.bias", f"{path}{ours}.bias", (3 * d,), Part(view, take))
        yield from affine(key + "attn.out_proj", path + "out", (d, d))
        yield from affine(key + "ln_2", path + "mlp_norm", (d,))
        yield from affine(key + "mlp.c_fc", path + "up", (f, d))
        yield from affine(key + "mlp.c_proj", path + "down", (d, f))
    yield from affine(prefix + "ln_post", "vision.last_norm", (width,))
    yield Entry(prefix + "proj", "vision.last", (width, width))


def _resampler(c: QwenVitConfig, d: int, prefix: str) -> Iterator[Entry]:
    path = "vision.resampler."
    yield Entry(prefix + "query", path + "tokens", (c.tokens, d))
    yield Entry(prefix + "pos_embed", path + "position", (c.tokens, d))
    if c.width != d:
        yield Entry(prefix + "kv_proj.weight", path + "inner.weight", (d, c.width))
    yield from affine(prefix + "ln_q", path + "query_norm", (d,))
    yield from affine(prefix + "ln_kv", path + "key_norm", (d,))
    yield from _thirds(prefix + "attn.in_proj_weight", path, ".weight", (3 * d, d))
    yield from _thirds(prefix + "attn.in_proj_bias", path, ".bias", (3 * d,))
    yield from affine(prefix + "attn.out_proj", path + "out", (d, d))


def _thirds(key: str, path: str, leaf: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    third = shape[0] // 3
    for place, ours in enumerate(_QKV):
        yield rows(key, path + ours + leaf, shape, place * third, third)
