"""The decoder's tensors, as Llama, Mistral and Qwen2 name them."""

from __future__ import annotations

from collections.abc import Iterator

from checkpoints_convert.tables.entry import Entry
from vlkv.config import DecoderConfig


def decoder(c: DecoderConfig, prefix: str) -> Iterator[Entry]:
    """All tensors of a decoder whose names begin with `prefix`."""
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
