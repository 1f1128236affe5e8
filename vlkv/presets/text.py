"""Language models, by themselves and as the decoders of other presets."""

from __future__ import annotations

from typing import Any

VICUNA_13B = dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
                  num_key_value_heads=40)  # fmt: skip


def _llama(**sizes: Any) -> dict[str, Any]:
    return dict(model_type="llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=32, vocab_size=32000, max_position_embeddings=4096,
                rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False) | sizes  # fmt: skip


def _qwen2(**sizes: Any) -> dict[str, Any]:
    return dict(model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False, sliding_window=32768,
                max_position_embeddings=32768, eos_token_id=151645) | sizes  # fmt: skip


# Qwen2's, and Qwen2.5's of the same sizes; 3b is Qwen2.5's alone.
QWEN2 = {
    "0.5b": _qwen2(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                   num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "1.5b": _qwen2(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                   num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "3b": _qwen2(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
                 num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
    "7b": _qwen2(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                 num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False),
    "72b": _qwen2(hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64,
                  num_key_value_heads=8, vocab_size=152064, tie_word_embeddings=False),
}  # fmt: skip
# Instruct, v0.2: the first one's sliding window is not supported.
MISTRAL = dict(model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
               num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, rms_norm_eps=1e-5, rope_theta=1e6,
               max_position_embeddings=32768, sliding_window=None, eos_token_id=2,
               tie_word_embeddings=False)  # fmt: skip
RAW: dict[str, dict[str, Any]] = {
    "vicuna-1.5-7b": _llama(),
    "vicuna-1.5-13b": _llama(**VICUNA_13B),
    "llama-3-8b": _llama(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, rope_theta=5e5,
                         max_position_embeddings=8192, bos_token_id=128000, eos_token_id=128009),
    "mistral-7b": MISTRAL,
    **{f"qwen2-{size}": QWEN2[size] for size in ("0.5b", "1.5b", "7b")},
}  # fmt: skip
