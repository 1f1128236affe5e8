"""Answer a question about an image (or none) from a compressed cache."""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
from rich.console import Console

from vlkv import loading
from vlkv.cache import pool_slots
from vlkv.commands.options import add_policy_arguments, policy_from
from vlkv.generate import check_room, generate
from vlkv.sampling import Greedy, Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv generate`."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint folder, or a hub id")
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="may be repeated")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    add_policy_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample instead of taking the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this mass")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from this many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of random policies")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights (default: their own)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """The answer on stdout, what it cost on stderr; or both as JSON."""
    # Everything that can be wrong is checked before weights are read.
    policy = policy_from(args, lambda: loading.load_processor(args.model).config)
    sampling: Greedy = Greedy(max_new_tokens=args.max_new_tokens)
    if (args.temperature, args.top_p, args.top_k) != (None, None, None):
        sampling = Sample(
            max_new_tokens=args.max_new_tokens,
            temperature=1.0 if args.temperature is None else args.temperature,
            top_p=1.0 if args.top_p is None else args.top_p,
            top_k=args.top_k,
        )
    processor = loading.load_processor(args.model)
    inputs = processor(args.image or None, args.prompt)
    check_room(processor.config, inputs, sampling.max_new_tokens)
    params = loading.load_params(args.model, dtype=args.dtype)
    begin = time.perf_counter()
    output = jax.jit(generate)(params, inputs, policy=policy, sampling=sampling, key=jax.random.key(args.seed))
    answer = processor.decode(output.tokens[0])
    seconds = time.perf_counter() - begin
    decoder = params.config.decoder
    entry = 2 * decoder.kv_heads * decoder.head_dim * params.decoder.embedding.weight[...].dtype.itemsize
    result = {
        "answer": answer,
        "tokens": int(output.lengths[0]),
        "policy": type(policy).__name__,
        "options": policy.options(),
        "prompt_tokens": int(inputs.valid.sum()),
        "kept_per_layer": np.asarray(output.length)[:, 0].mean(axis=1).tolist(),
        "cache_bytes": output.cache_bytes,
        "slots": pool_slots(
            policy, layers=decoder.layers, vision=inputs.max_vision, text=inputs.max_text,
            new_tokens=sampling.max_new_tokens, images=inputs.max_images,
        ),
        "slot_bytes": entry,
        "seconds_with_compilation": round(seconds, 3),
    }  # fmt: skip
    if args.json:
        return result
    kept = sum(result["kept_per_layer"]) / decoder.layers
    Console(stderr=True).print(
        f"{result['policy']}: {kept:.1f} of {result['prompt_tokens']} prompt entries kept per layer, "
        f"cache {result['cache_bytes'] / 2**20:.2f} MiB, {seconds:.1f} s with compilation", highlight=False,
    )  # fmt: skip
    return answer
