"""Configs of published text models, which other families use as decoders."""

from __future__ import annotations

from typing import Any

from vlkv.families.text.config import KINDS

VICUNA_13B = dict(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
                  num_key_value_heads=40)  # fmt: skip


def llama(**sizes: Any) -> dict[str, Any]:
    """Llama 2 7B, with the given fields replaced."""
    return dict(KINDS["llama"].defaults, model_type="llama", num_key_value_heads=32, max_position_embeddings=4096,
                rms_norm_eps=1e-5, bos_token_id=1, tie_word_embeddings=False) | sizes  # fmt: skip


def _llama3(factor: float, **sizes: Any) -> dict[str, Any]:
    """Llama 3.1 and 3.2 (Instruct), for prompts of 131072 tokens."""
    scaling = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)  # fmt: skip
    return llama(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=5e5,
                 rope_scaling=scaling, bos_token_id=128000, eos_token_id=[128001, 128008, 128009], **sizes)  # fmt: skip


def _qwen2(**sizes: Any) -> dict[str, Any]:
    return dict(model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6, use_sliding_window=False, sliding_window=32768,
                max_position_embeddings=32768, eos_token_id=151645) | sizes  # fmt: skip


def internlm2(factor: float = 2.0, **sizes: Any) -> dict[str, Any]:
    """InternLM2 7B for prompts of 32768 tokens, with the given fields replaced."""
    return dict(KINDS["internlm2"].defaults, model_type="internlm2", vocab_size=92544, intermediate_size=14336,
                num_key_value_heads=8, max_position_embeddings=32768, rope_theta=1e6, bias=False, rms_norm_eps=1e-5,
                rope_scaling=dict(type="dynamic", factor=factor), tie_word_embeddings=False) | sizes  # fmt: skip


# Qwen2 and Qwen2.5; 3b exists only in Qwen2.5.
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


def _qwen3(**sizes: Any) -> dict[str, Any]:
    return dict(KINDS["qwen3"].defaults, model_type="qwen3", num_key_value_heads=8, max_position_embeddings=40960,
                rope_theta=1e6, eos_token_id=[151645, 151643]) | sizes  # fmt: skip


QWEN3 = {
    "0.6b": _qwen3(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                   tie_word_embeddings=True),
    "1.7b": _qwen3(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
                   tie_word_embeddings=True),
    "4b": _qwen3(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, tie_word_embeddings=True),
    "8b": _qwen3(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, tie_word_embeddings=False),
    "14b": _qwen3(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
                  tie_word_embeddings=False),
    "32b": _qwen3(hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
                  tie_word_embeddings=False),
}  # fmt: skip


def _qwen3_moe(**sizes: Any) -> dict[str, Any]:
    return dict(KINDS["qwen3_moe"].defaults, model_type="qwen3_moe", head_dim=128, num_key_value_heads=4,
                max_position_embeddings=40960, rope_theta=1e6, eos_token_id=[151645, 151643], norm_topk_prob=True,
                mlp_only_layers=[], tie_word_embeddings=False) | sizes  # fmt: skip


QWEN3_MOE = {
    "30b-a3b": _qwen3_moe(num_hidden_layers=48),
    "235b-a22b": _qwen3_moe(hidden_size=4096, intermediate_size=12288, num_hidden_layers=94, num_attention_heads=64,
                            moe_intermediate_size=1536),
}  # fmt: skip
# Gemma 3 (Instruct); larger ones see images.
GEMMA3 = dict(KINDS["gemma3_text"].defaults, model_type="gemma3_text", vocab_size=262144, num_attention_heads=4,
              num_key_value_heads=1, max_position_embeddings=32768, sliding_window=512,
              eos_token_id=[1, 106])  # fmt: skip
# Instruct v0.2; v0.1 has a sliding window.
MISTRAL = dict(KINDS["mistral"].defaults, model_type="mistral", rms_norm_eps=1e-5, rope_theta=1e6,
               max_position_embeddings=32768, sliding_window=None, tie_word_embeddings=False)  # fmt: skip
# Phi-3-mini-128k-instruct, first version; its factors are rounded to remove float32 noise.
_SHORT = [1.05, 1.05, 1.05, 1.1, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.5, *[2.0] * 21, 2.05, 2.05, 2.05, 2.1, 2.1, 2.1,
          2.15, 2.15, 2.35, 2.55, 2.6, 2.6, 2.75, 2.85, 2.85, 2.95]  # fmt: skip
_LONG = [1.03, 1.05, 1.05, 1.08, 1.23, 1.23, 1.3, 1.45, 1.6, 1.65, 1.9, 2.86, 3.69, 5.42, 5.49, 5.49, 9.09, 11.58,
         15.66, 15.77, 15.79, 18.36, 21.99, 23.08, 30.01, 32.35, 32.59, 35.56, 39.95, 53.84, 56.2, 57.95, 59.29, 59.77,
         59.92, 61.19, 61.96, 62.5, 63.37, 63.48, 63.48, 63.66, 63.85, 64.08, 64.76, 64.8, 64.81, 64.81]  # fmt: skip
PHI3_MINI = dict(KINDS["phi3"].defaults, model_type="phi3", max_position_embeddings=131072, sliding_window=262144,
                 rope_scaling=dict(type="su", short_factor=_SHORT, long_factor=_LONG),
                 tie_word_embeddings=False)  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "vicuna-1.5-7b": llama(),
    "vicuna-1.5-13b": llama(**VICUNA_13B),
    "llama-3-8b": llama(intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, rope_theta=5e5,
                        max_position_embeddings=8192, bos_token_id=128000, eos_token_id=128009),
    "llama-3.1-8b": _llama3(8.0, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                            num_attention_heads=32, head_dim=128, tie_word_embeddings=False),
    "llama-3.2-1b": _llama3(32.0, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                            num_attention_heads=32, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(32.0, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                            num_attention_heads=24, head_dim=128, tie_word_embeddings=True),
    "mistral-7b": MISTRAL,
    "mistral-7b-v0.1": MISTRAL | dict(rope_theta=1e4, sliding_window=4096),
    "gemma-3-270m": GEMMA3 | dict(hidden_size=640, intermediate_size=2048, num_hidden_layers=18),
    "gemma-3-1b": GEMMA3 | dict(hidden_size=1152, intermediate_size=6912, num_hidden_layers=26),
    **{f"qwen2-{size}": QWEN2[size] for size in ("0.5b", "1.5b", "7b")},
    **{f"qwen3-{size}": fields for size, fields in QWEN3.items()},
    **{f"qwen3-{size}": fields for size, fields in QWEN3_MOE.items()},
    "phi-3-mini": PHI3_MINI,
    "internlm2-7b": internlm2(),
}  # fmt: skip
