"""Answer a question about an image (or none) from a compressed cache.

  vlkv generate --model mini --image page.png --prompt "read the page" \\
      --policy snapkv --keep 0.2
  vlkv generate --model llava-hf/llava-1.5-7b-hf --image cat.png \\
      --prompt "What is this?" --policy aircache --keep 0.1 \\
      --with "store=kivi(bits=4)"

With --save-cache the images are compressed before the question is known, and kept in a file; with --from-cache other
questions about them are answered from it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from vlkv import loading, saving
from vlkv.buckets import round_up
from vlkv.cache import resize
from vlkv.commands.options import add_model_arguments, add_policy_arguments, policy_from
from vlkv.errors import InputError
from vlkv.extend import extend
from vlkv.families import Model
from vlkv.generate import check_room, decode, generate
from vlkv.policies import Policy
from vlkv.prefill import prefill
from vlkv.processing import Processor
from vlkv.sampling import Greedy, Sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv generate`."""
    add_model_arguments(parser)
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="a picture; may be repeated")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the question")
    add_policy_arguments(parser)
    parser.add_argument("--save-cache", metavar="FILE", help="keep what the policy leaves of the images in this file")
    parser.add_argument("--from-cache", metavar="FILE", help="ask about images that such a file holds")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="the longest answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample instead of taking the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this mass")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from this many likeliest tokens")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of random policies")
    parser.add_argument("--json", action="store_true", help="print JSON")


class _Done(NamedTuple):
    """An answer, and the cache that it came from."""

    tokens: Any  # [1, S]
    lengths: Any  # [1]
    policy: Policy
    prompt_tokens: int
    kept: Any  # [L, 1, K]
    cache_bytes: int
    slots: int


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
    if args.save_cache is None and args.from_cache is None:
        inputs = processor(args.image or None, args.prompt)
        check_room(processor.config, inputs, sampling.max_new_tokens)
        params = loading.load_params(args.model, dtype=args.dtype)
        begin = time.perf_counter()
        output = jax.jit(generate)(params, inputs, policy=policy, sampling=sampling, key=jax.random.key(args.seed))
        done = _Done(
            output.tokens, output.lengths, policy, int(inputs.valid.sum()), output.length, output.cache_bytes,
            output.slots,
        )  # fmt: skip
    else:
        _check_files(args)
        params = loading.load_params(args.model, dtype=args.dtype)
        begin = time.perf_counter()
        if args.save_cache is not None:
            _save(args, policy, params, processor)
        done = _answer_from(args, sampling, params, processor)
    answer = processor.decode(np.asarray(done.tokens)[0], np.asarray(done.lengths)[0])
    seconds = time.perf_counter() - begin
    decoder = params.config.decoder
    result = {
        "answer": answer,
        "tokens": int(done.lengths[0]),
        "policy": type(done.policy).__name__,
        "options": done.policy.options(),
        "prompt_tokens": done.prompt_tokens,
        "kept_per_layer": np.asarray(done.kept)[:, 0].mean(axis=1).tolist(),
        "cache_bytes": done.cache_bytes,
        "slots": done.slots,
        "slot_bytes": 2 * decoder.kv_heads * decoder.head_dim * params.decoder.embedding.weight[...].dtype.itemsize,
        "seconds_with_compilation": round(seconds, 3),
    }
    if args.json:
        return result
    kept = sum(result["kept_per_layer"]) / decoder.layers
    Console(stderr=True).print(
        f"{result['policy']}: {kept:.1f} of {result['prompt_tokens']} prompt entries kept per layer, "
        f"cache {result['cache_bytes'] / 2**20:.2f} MiB, {seconds:.1f} s with compilation", highlight=False,
    )  # fmt: skip
    return answer


def _check_files(args: argparse.Namespace) -> None:
    if args.save_cache is not None and not args.image:
        raise InputError("--save-cache keeps what is left of images: give at least one --image")
    if args.from_cache is None:
        return
    if args.save_cache is not None or args.image:
        raise InputError("--from-cache holds its images: leave out --save-cache and --image")
    if args.policy != "full" or args.parts or (args.keep, args.budget, args.scope) != (None, None, None):
        raise InputError("--from-cache was made by a policy of its own: leave out --policy and its options")


def _save(args: argparse.Namespace, policy: Policy, params: Model, processor: Processor) -> None:
    """What the policy keeps of the images, and of the prompt up to the question."""
    inputs = processor(args.image, args.prompt, question=False)
    check_room(processor.config, inputs, args.max_new_tokens)
    key = jax.random.split(jax.random.key(args.seed))[0]
    cache, _ = jax.jit(prefill, static_argnames="new_tokens")(params, inputs, policy, new_tokens=1, key=key)
    note = {"images": len(args.image), "prompt_tokens": int(inputs.valid.sum())}
    saving.save_cache(args.save_cache, params, cache, policy=policy, note=note)


def _answer_from(args: argparse.Namespace, sampling: Greedy, params: Model, processor: Processor) -> _Done:
    """The question fed to a saved cache, which gets as much room as it takes."""
    file = args.from_cache or args.save_cache
    cache, (policy, note) = saving.load_cache(file, params), saving.read_note(file)
    if policy is None or "images" not in note:
        raise InputError(f"{file}: not made by --save-cache; ask through `vlkv.extend`")
    before = processor.prompts.before_question(args.prompt, note["images"])
    fed = processor.extension([before], [processor.prompts.write(args.prompt, note["images"])])
    question = int(fed.valid.sum())
    room = round_up(question, processor.buckets.text) + sampling.max_new_tokens
    cache = resize(cache, int(cache.used[0]) + room)
    cache, logits = jax.jit(extend)(params, cache, fed)
    key = jax.random.split(jax.random.key(args.seed))[1]
    tokens, lengths = jax.jit(decode, static_argnames="sampling")(params, cache, logits, sampling=sampling, key=key)
    kept = cache.counts
    return _Done(tokens, lengths, policy, note["prompt_tokens"] + question, kept, cache.bytes, cache.slots)
