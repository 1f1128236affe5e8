"""The peers in torch: transformers' attention and cache, compressed by kvpress. Needs the extra `peers`.

Decodes as kvpress does: one forward pass per token with the true position, without `generate`, which would only add
time.
"""

import contextlib
import gc
import json
import os
import time
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints_convert import packaged
from vlkv.errors import InputError
from vlkv.mini import CHECKPOINT

METHODS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("peer_methods.toml").read_text())
WINDOW = 64  # of the methods that observe
# Text models with random weights: fields of their config.json.
SIZES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("peer_models.toml").read_text())


class Run(NamedTuple):
    """The times of one run."""

    prefill_seconds: float
    step_seconds: float
    kept: float  # cache entries per layer after the prompt
    first: np.ndarray  # logits of the first new token


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def use_device(backend: str) -> None:
    """Uses as many threads as cores; InputError unless torch has the same kind of device as jax, `backend`."""
    import torch

    if on_gpu() != (backend == "gpu"):
        has = "has" if on_gpu() else "has no"
        raise InputError(
            f"jax runs on {backend}, torch {has} CUDA: a comparison needs both on one device (JAX_PLATFORMS, "
            "CUDA_VISIBLE_DEVICES)"
        )
    torch.set_num_threads(os.cpu_count() or 1)


def free() -> None:
    """Returns the memory of deleted models and tensors to the device, where jax can use it."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def read_speed(size: int) -> float:
    """Bytes per second of summing `size` bytes on all cores or the GPU: about the speed of reading weights."""
    import torch

    x = torch.ones(size // 4, device="cuda" if on_gpu() else "cpu")
    best = 0.0
    for _ in range(4):  # the first starts the threads
        begin = time.perf_counter()
        x.sum().item()
        best = max(best, size / (time.perf_counter() - begin))
    return best


def make_checkpoint(name: str, folder: Path) -> Path:
    """A folder with a text model: SmolLM2's own; or a new one with random weights or the demo model's decoder."""
    if name == "smollm2":
        return packaged.written()
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name != "mini":
        config = AutoConfig.for_model(**{"tie_word_embeddings": True, "max_position_embeddings": 8192} | SIZES[name])
        with torch.device("cuda" if on_gpu() else "cpu"):  # a GPU draws 7 billion weights in a second
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        free()
        return folder
    text = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]
    model = LlamaForCausalLM(LlamaConfig(**{**text, "max_position_embeddings": 8192}))
    weights = load_file(CHECKPOINT / "model.safetensors")
    names = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head": "lm_head"}
    for before, after in names.items():
        weights = {key.replace(before, after): value for key, value in weights.items()}
    model.load_state_dict({key: weights[key] for key in model.state_dict()})
    model.save_pretrained(folder)
    return folder


class Peer:
    """One checkpoint in transformers with one attention implementation."""

    def __init__(self, folder: Path, attention: str, *, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        kind = getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=kind)
        self.torch, self.gpu = torch, on_gpu()
        self.model = model.eval().to("cuda" if self.gpu else "cpu")

    def run(self, tokens: np.ndarray, method: str, keep: float, new: int) -> Run:
        """Prefill with compression, then `new` - 1 greedy steps."""
        torch = self.torch

        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.model.device)
        compressing: Any = contextlib.nullcontext()
        if "press" in METHODS[method]:
            import kvpress

            kind, options = METHODS[method]["press"], METHODS[method].get("options", {})
            compressing = getattr(kvpress, kind)(1 - keep, **options)(self.model)
        with torch.inference_mode():
            self._wait()
            begin = time.perf_counter()
            with compressing:
                output = self.model(ids, use_cache=True, logits_to_keep=1)  # the model makes its own kind of cache
            self._wait()
            middle = time.perf_counter()
            cache, logits = output.past_key_values, output.logits[:, -1]
            kept = float(np.mean([cache.get_seq_length(i) for i in range(self.model.config.num_hidden_layers)]))
            token = logits.argmax(dim=-1, keepdim=True)
            self._wait()
            start = time.perf_counter()
            for i in range(new - 1):
                place = torch.full_like(token, ids.shape[1] + i)
                token = self.model(token, past_key_values=cache, position_ids=place).logits[:, -1].argmax(-1, True)
            self._wait()
            end = time.perf_counter()
        first = logits.float().cpu().numpy()
        return Run(middle - begin, (end - start) / (new - 1), kept, first)

    def _wait(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()
