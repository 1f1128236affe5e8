"""Writes kvpress.npz: logits of decoding after kvpress' own presses, on a Llama whose weights are drawn by numpy.

    python -m tests.golden.kvpress_logits        (with kvpress 0.5.5 and transformers 5.2)

`tests/policies/test_golden.py` reads the file and draws the same weights.
"""

import zlib
from pathlib import Path

import numpy as np

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 96,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PROMPT, NEW, KEPT = 192, 6, 48  # tokens of the prompt, tokens that follow, kept entries per head
INSTRUCTION = (9, 44, 17, 80, 5)  # ids of KVzip's request to repeat the prompt, and of the template's text after it
FILE = Path(__file__).parent / "kvpress.npz"


def weights() -> dict[str, np.ndarray]:
    """Float32 arrays under the names of transformers. Queries are scaled up, so that attention is peaked."""
    wide, narrow, inner, vocabulary = 96, 32, 128, CONFIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocabulary, wide), "lm_head.weight": (vocabulary, wide),
              "model.norm.weight": (wide,)}  # fmt: skip
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in {
            "self_attn.q_proj": (wide, wide), "self_attn.k_proj": (narrow, wide), "self_attn.v_proj": (narrow, wide),
            "self_attn.o_proj": (wide, wide), "mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide),
            "mlp.down_proj": (wide, inner), "input_layernorm": (wide,), "post_attention_layernorm": (wide,),
        }.items()}  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            made[name] = 1 + 0.1 * noise
        else:
            gain = 3.0 if "q_proj" in name else 2.0 if "lm_head" in name else 1.0
            made[name] = gain * noise / np.float32(np.sqrt(shape[1]))
    return made


def tokens() -> np.ndarray:
    """The prompt and the tokens that follow, none of them twice: keys of equal norms would tie in the first layer."""
    return np.random.default_rng(7).permutation(np.arange(3, CONFIG["vocab_size"]))[: PROMPT + NEW]


class Tokenizer:
    """What KVzipPress asks of a tokenizer."""

    chat_template = None

    def encode(self, text, return_tensors, add_special_tokens):
        import torch

        ids = {"": (), "\n": INSTRUCTION[-1:]}.get(text, INSTRUCTION[:-1])
        return torch.tensor([ids], dtype=torch.long)


def main() -> None:
    """Runs each press once."""
    import kvpress
    import torch
    from kvpress.presses import kvzip_press
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    options = {name: value for name, value in CONFIG.items() if name not in ("architectures", "model_type")}
    ratio = 1 - (KEPT + 0.25) / PROMPT  # kvpress rounds down or to the nearest number
    # Its first stage contains the window of 8 tokens: 8 + 40 / 2 of 48 entries.
    critical = kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio, window_size=8), first_stage_ratio=28.2 / KEPT)
    presses = {
        "snapkv": kvpress.SnapKVPress(ratio, window_size=8), "tova": kvpress.TOVAPress(ratio),
        "pyramidkv": kvpress.PyramidKVPress(ratio, window_size=6, beta=4),
        "streamingllm": kvpress.StreamingLLMPress(ratio), "knorm": kvpress.KnormPress(ratio),
        "keydiff": kvpress.KeyDiffPress(ratio), "observed": kvpress.ObservedAttentionPress(ratio),
        "adakv": kvpress.AdaKVPress(kvpress.SnapKVPress(ratio, window_size=8), alpha_safeguard=0.0),
        "expectedattention": kvpress.ExpectedAttentionPress(ratio, n_future_positions=64),
        "criticalkv": critical, "kvzip": kvpress.KVzipPress(1 - (KEPT - 0.01) / PROMPT),
    }  # fmt: skip
    kvzip_press.AutoTokenizer.from_pretrained = lambda *_: Tokenizer()
    evict, scores = presses["kvzip"].compress_post, []
    presses["kvzip"].compress_post = lambda model: (
        scores.append(presses["kvzip"].score_val[:, 0].numpy()),
        evict(model),
    )
    ids = torch.from_numpy(tokens())[None]
    made = {}
    for name, press in presses.items():
        eager = "eager" if name == "observed" else "sdpa"
        model = LlamaForCausalLM(LlamaConfig(**options, attn_implementation=eager)).eval()
        model.load_state_dict({key: torch.from_numpy(value) for key, value in weights().items()})
        cache, logits = DynamicCache(), []
        with torch.inference_mode():
            with press(model):
                model(ids[:, :PROMPT], past_key_values=cache, output_attentions=name == "observed")
            for place in range(PROMPT, PROMPT + NEW):
                at = torch.tensor([[place]])
                logits.append(model(ids[:, place : place + 1], past_key_values=cache, position_ids=at).logits[0, 0])
        made[name] = torch.stack(logits).numpy()
        made[f"{name}_entries"] = np.array([layer.keys.shape[2] for layer in cache.layers]) - NEW
    np.savez_compressed(FILE, **made, kvzip_scores=scores[0])


if __name__ == "__main__":
    main()
