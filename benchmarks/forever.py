"""Bytes and steps of caches that are selected again while decoding. docs/forever.md.

python -m benchmarks.forever draw    docs/images/forever.png: bytes of Qwen3-8B during an answer; without weights
python -m benchmarks.forever steps   steps of SmolLM2-135M in float32 beside those of one-shot SnapKV, and the bytes
                                     over 4,000 tokens, into benchmarks/results/forever/steps.json
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import vlkv
from benchmarks.real import folders
from vlkv import families, policies
from vlkv.files import write_json
from vlkv.generation import jitted
from vlkv.policies import compose
from vlkv.tools.benching import machine

PROMPT, NEW = 1024, 16384
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "forever.png"


def allocated(params, policy: policies.Policy, new_tokens: int) -> int:
    """Bytes of a cache in bfloat16 with capacity for an answer."""
    tokens = np.ones((1, PROMPT), int)
    inputs = vlkv.Inputs.from_hf({"input_ids": tokens, "attention_mask": tokens}, params.config)
    make = partial(vlkv.prefill, policy=policy, new_tokens=new_tokens)
    cache, _ = jax.eval_shape(make, params, inputs)
    return cache.bytes


def draw() -> None:
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


BUDGET, EVERY, STEPS, LONG, ROUNDS = 256, 128, 256, 4000, 5
RESULT = Path(__file__).parent / "results" / "forever" / "steps.json"


def periodic() -> dict[str, policies.Policy]:
    """Methods that select `BUDGET` entries again, and have a tail of `EVERY` slots."""
    again = partial(compose, every=EVERY)
    return {
        "SnapKV": again(policies.SnapKV(budget=BUDGET)),
        "AdaKV": again(policies.AdaKV(budget=BUDGET)),
        "RKV": policies.RKV(budget=BUDGET, interval=EVERY),
        "TriAttention": policies.TriAttention(budget=BUDGET, interval=EVERY, keep_prompt=False),
    }


def steps() -> None:
    """Times steps in alternated rounds, counts bytes, and writes both."""
    params, processor = vlkv.load(folders.written(), dtype="float32")
    ids = np.array(
        [processor.tokenizer.encode((Path(__file__).parents[1] / "docs/architecture.md").read_text())[:1001]]
    )
    inputs = vlkv.Inputs.from_hf({"input_ids": ids, "attention_mask": np.ones_like(ids)}, params.config)
    again = periodic()
    # The one-shot cache also has a tail of `EVERY` slots, so it decodes fewer tokens.
    runs = {"one-shot SnapKV": decoding(params, inputs, policies.SnapKV(budget=BUDGET), EVERY)}
    runs |= {name: decoding(params, inputs, policy, STEPS) for name, policy in again.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            count = jax.block_until_ready(runs[name]()[0]).shape[1]
            times[name].append((time.perf_counter() - begin) / count)
    first = times["one-shot SnapKV"]
    result: dict[str, Any] = {**machine.describe(), "methods": {}}
    for name, each in times.items():
        ratio = float(np.median(np.divide(each, first)))
        result["methods"][name] = {"ms": round(1e3 * float(np.median(each)), 2), "ratio": round(ratio, 3)}
        print(name, result["methods"][name], flush=True)
    for name, policy in again.items():
        result["methods"][name]["bytes"] = counted(params, inputs, policy)
        print(name, result["methods"][name]["bytes"], flush=True)
    write_json(RESULT, result)


def decoding(params: Any, inputs: Any, policy: policies.Policy, count: int) -> Any:
    """Compiles and runs `count` steps after a prompt, and returns a function that runs them again."""
    cache, logits = jitted.prefill(params, inputs, policy, new_tokens=count)
    sampling = vlkv.Greedy(max_new_tokens=count, stop=())
    run = partial(jitted.decode, params, cache, logits, sampling=sampling)
    jax.block_until_ready(run())
    return run


def counted(params: Any, inputs: Any, policy: policies.Policy) -> list[int]:
    """Bytes of the arrays of a cache after the prompt, and after every 500 of `LONG` tokens."""

    @jax.jit
    def some(params: Any, cache: Any, logits: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            cache, logits = carry
            return vlkv.decode_step(params, cache, jnp.argmax(logits, axis=-1)), None

        return jax.lax.scan(step, (cache, logits), length=500)[0]

    cache, logits = jitted.prefill(params, inputs, policy, new_tokens=LONG)
    found = [sum(x.nbytes for x in jax.tree.leaves(cache))]
    for _ in range(LONG // 500):
        cache, logits = some(params, cache, logits)
        assert np.isfinite(logits).all()
        found.append(sum(x.nbytes for x in jax.tree.leaves(cache)))
    return found


def main() -> None:
    """Runs one of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("draw", "steps"))
    {"draw": draw, "steps": steps}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
