"""The decoder's tensors, as Llama, Mistral and Qwen2 name them, as Phi-3 fuses them, and as InternLM2 does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from checkpoints_convert.tables.entry import Entry, Part, rows
from vlkv.config import DecoderConfig


def decoder(c: DecoderConfig, prefix: str) -> Iterator[Entry]:
    """All tensors of a decoder whose names begin with `prefix`."""
    embedding = "tok_embeddings" if c.names == "internlm2" else "embed_tokens"
    yield Entry(f"{prefix}{embedding}.weight", "decoder.embedding.weight", (c.vocab_size, c.width))
    for i in range(c.layers):
        yield from _LAYERS[c.names](c, f"{prefix}layers.{i}.", f"decoder.layers.{i}.")
    yield Entry(prefix + "norm.weight", "decoder.norm.weight", (c.width,))
    if not c.tied:
        yield Entry("lm_head.weight", "decoder.head.weight", (c.vocab_size, c.width))


def _llama(c: DecoderConfig, key: str, path: str) -> Iterator[Entry]:
    d, f, q, kv = c.width, c.mlp_width, c.heads * c.head_dim, c.kv_heads * c.head_dim
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


def _phi3(c: DecoderConfig, key: str, path: str) -> Iterator[Entry]:
    d, f, q, kv = c.width, c.mlp_width, c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield Entry(key + "input_layernorm.weight", path + "attention_norm.weight", (d,))
    fused, shape = key + "self_attn.qkv_proj.weight", (q + 2 * kv, d)
    yield rows(fused, path + "query.weight", shape, 0, q)
    yield rows(fused, path + "key.weight", shape, q, kv)
    yield rows(fused, path + "value.weight", shape, q + kv, kv)
    yield Entry(key + "self_attn.o_proj.weight", path + "out.weight", (d, q))
    yield Entry(key + "post_attention_layernorm.weight", path + "mlp_norm.weight", (d,))
    yield rows(key + "mlp.gate_up_proj.weight", path + "gate.weight", (2 * f, d), 0, f)
    yield rows(key + "mlp.gate_up_proj.weight", path + "up.weight", (2 * f, d), f, f)
    yield Entry(key + "mlp.down_proj.weight", path + "down.weight", (d, f))


def _internlm2(c: DecoderConfig, key: str, path: str) -> Iterator[Entry]:
    d, f, g = c.width, c.mlp_width, c.heads // c.kv_heads
    yield Entry(key + "attention_norm.weight", path + "attention_norm.weight", (d,))
    # Each key head brings its own queries along: [K, G queries, key, value, H].
    view = (c.kv_heads, g + 2, c.head_dim)
    fused = c.kv_heads * (g + 2) * c.head_dim
    for ours, take in (("query", slice(g)), ("key", slice(g, g + 1)), ("value", slice(g + 1, g + 2))):
        name = f"{key}attention.wqkv"
        yield Entry(name + ".weight", f"{path}{ours}.weight", (fused, d), Part((*view, d), (slice(None), take)))
        if c.qkv_bias:
            yield Entry(name + ".bias", f"{path}{ours}.bias", (fused,), Part(view, (slice(None), take)))
    yield Entry(key + "attention.wo.weight", path + "out.weight", (d, c.heads * c.head_dim))
    if c.out_bias:
        yield Entry(key + "attention.wo.bias", path + "out.bias", (d,))
    yield Entry(key + "ffn_norm.weight", path + "mlp_norm.weight", (d,))
    yield Entry(key + "feed_forward.w1.weight", path + "gate.weight", (f, d))
    yield Entry(key + "feed_forward.w3.weight", path + "up.weight", (f, d))
    yield Entry(key + "feed_forward.w2.weight", path + "down.weight", (d, f))


_LAYERS: dict[str, Callable[[DecoderConfig, str, str], Iterator[Entry]]] = {
    "llama": _llama,
    "phi3": _phi3,
    "internlm2": _internlm2,
}
