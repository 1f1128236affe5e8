"""Compares a decode step of H2O with one without eviction, after 512 new tokens and at the same budget.

    python -m benchmarks.eviction [--pairs 15] [--out JSON]

A 110m decoder with random weights, a prompt of 1024 tokens, keep=0.2. The two programs, of 16 steps each, run
alternately. "static" is H2O(evict=False): the pool does not change, and its few new tokens go to a tail.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vlkv
from vlkv import policies
from vlkv.config import DecoderConfig, ModelConfig
from vlkv.files import write_json
from vlkv.terminal import OneLineParser
from vlkv.tools.benching import machine

RESULT = Path(__file__).parent / "results" / "eviction.json"
PROMPT, KEEP, FED, STEPS = 1024, 0.2, 512, 16
DECODER = DecoderConfig(
    vocab_size=32000, width=768, mlp_width=2048, layers=12, heads=12, kv_heads=12, head_dim=64, norm_eps=1e-6,
    max_positions=8192,
)  # fmt: skip


@jax.jit
def steps(params: Any, cache: vlkv.PackedCache, token: jax.Array) -> tuple[vlkv.PackedCache, jax.Array]:
    """`STEPS` greedy steps in one program, so that the cache is copied only once."""

    def step(state: tuple[vlkv.PackedCache, jax.Array], _: None) -> tuple[tuple[vlkv.PackedCache, jax.Array], None]:
        cache, logits = vlkv.decode_step(params, *state)
        return (cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)), None

    return jax.lax.scan(step, (cache, token), length=STEPS)[0]


def main() -> int:
    """Measures, prints and writes the JSON."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    params = vlkv.init(ModelConfig(family="llama", decoder=DECODER), jax.random.key(0))
    row = np.random.default_rng(0).integers(0, DECODER.vocab_size, (1, PROMPT))
    inputs = vlkv.Inputs(
        tokens=row, positions=np.arange(PROMPT)[None, :, None], valid=row >= 0, vision_index=np.full_like(row, -1),
        pixels=None, grid=np.full((1, PROMPT, 3), -1), max_vision=0, max_text=PROMPT, max_instruction=PROMPT,
        max_images=1,
    )  # fmt: skip
    prefill = jax.jit(vlkv.prefill, static_argnames="new_tokens")
    caches, token = {}, jnp.zeros(1, jnp.int32)
    for name, policy, new in (
        ("static", policies.H2O(keep=KEEP, evict=False), STEPS), ("h2o", policies.H2O(keep=KEEP), FED + STEPS),
    ):  # fmt: skip
        caches[name], _ = prefill(params, inputs, policy, new_tokens=new)
    for _ in range(FED // STEPS):
        caches["h2o"], token = steps(params, caches["h2o"], token)
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    for _ in range(args.pairs + 1):
        for name, cache in caches.items():
            begin = time.perf_counter()
            jax.block_until_ready(steps(params, cache, token))
            seconds[name].append((time.perf_counter() - begin) / STEPS)
    ratios = np.array(seconds["h2o"][1:]) / seconds["static"][1:]  # the first compiles
    mean, error = np.log(ratios).mean(), np.log(ratios).std(ddof=1) / np.sqrt(len(ratios))
    result = {
        "command": "python -m benchmarks.eviction", "machine": machine.describe(), "commit": machine.commit(),
        "milliseconds": {name: round(1e3 * float(np.median(taken[1:])), 2) for name, taken in seconds.items()},
        "slots": {name: cache.slots for name, cache in caches.items()},
        "bytes": {name: cache.bytes for name, cache in caches.items()},
        "ratio": {"median": round(float(np.median(ratios)), 3),
                  "interval": [round(float(np.exp(mean + x * error)), 3) for x in (-1.96, 1.96)]},
        "pairs": args.pairs,
    }  # fmt: skip
    print(result)
    write_json(args.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
