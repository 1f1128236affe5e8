"""Draws docs/images/forever.png: bytes of caches of Qwen3-8B during an answer, as allocated. No weights are needed.

python -m benchmarks.forever
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import vlkv
from vlkv import families, policies
from vlkv.policies import compose

PROMPT, NEW = 1024, 16384
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "forever.png"


def allocated(params, policy: policies.Policy, new_tokens: int) -> int:
    """Bytes of a cache in bfloat16 with capacity for an answer."""
    tokens = np.ones((1, PROMPT), int)
    inputs = vlkv.Inputs.from_hf({"input_ids": tokens, "attention_mask": tokens}, params.config)
    make = partial(vlkv.prefill, policy=policy, new_tokens=new_tokens)
    cache, _ = jax.eval_shape(make, params, inputs)
    return cache.bytes


def main() -> None:
    """Draws the picture."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    config = vlkv.presets["qwen3-8b"]
    params = families.abstract(config, jnp.bfloat16)
    decoder, tokens = config.decoder, np.arange(NEW + 1)
    growing = 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * 2 * (PROMPT + tokens)
    snapkv, again = policies.SnapKV(budget=2048), compose(policies.SnapKV(budget=2048), every=128)
    _, axes = plt.subplots(figsize=(6, 3))
    axes.plot(tokens, growing / 2**20, label="transformers, full cache")
    for name, policy in (("SnapKV(budget=2048)", snapkv), ("compose(SnapKV(budget=2048), every=128)", again)):
        axes.plot([0, NEW], [allocated(params, policy, NEW) / 2**20] * 2, label=name)
    axes.set(xlabel="tokens of the answer", ylabel="MiB", ylim=0, title=f"Qwen3-8B after {PROMPT} tokens")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2))
    plt.savefig(IMAGE, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
