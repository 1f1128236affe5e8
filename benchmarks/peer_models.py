"""The models of `benchmarks.peers`, as checkpoint folders that vlkv and transformers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import torch_side
from benchmarks.real import folders
from vlkv.mini import CHECKPOINT

# Text models with random weights: fields of their `config.json`.
SIZES: dict[str, dict[str, Any]] = {
    "110m": dict(model_type="llama", vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
                 num_attention_heads=12, num_key_value_heads=12),
    "gemma3-200m": dict(model_type="gemma3_text", vocab_size=32000, hidden_size=896, intermediate_size=3584,
                        num_hidden_layers=15, num_attention_heads=4, num_key_value_heads=1, sliding_window=512),
    "qwen2-7b": dict(model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944,
                     num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
                     max_position_embeddings=32768, dtype="bfloat16"),
    "qwen3.5-200m": dict(model_type="qwen3_5_text", vocab_size=32000, hidden_size=896, intermediate_size=2688,
                         num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
                         linear_num_key_heads=8, linear_num_value_heads=8),
    "tiny": dict(model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2),
}  # fmt: skip


def make_checkpoint(name: str, folder: Path) -> Path:
    """A folder with a text model: SmolLM2's own; or a new one with random weights or the demo model's decoder."""
    if name == "smollm2":
        return folders.written()
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name != "mini":
        shared = dict(tie_word_embeddings=True, max_position_embeddings=8192)
        config = AutoConfig.for_model(**shared | SIZES[name])
        with torch.device("cuda" if torch_side.on_gpu() else "cpu"):  # a GPU draws 7 billion weights in a second
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        torch_side.free()
        return folder
    text = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]
    model = LlamaForCausalLM(LlamaConfig(**{**text, "max_position_embeddings": 8192}))
    held = load_file(CHECKPOINT / "model.safetensors")
    named = {key.replace("language_model.model.", "model.").replace("model.language_model.", "model."): value
             for key, value in held.items()}  # fmt: skip
    named = {key.replace("language_model.lm_head", "lm_head"): value for key, value in named.items()}
    model.load_state_dict({key: named[key] for key in model.state_dict()})
    model.save_pretrained(folder)
    return folder
