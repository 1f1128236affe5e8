"""Answer a question, with or without images, from a compressed cache. The answer is printed token by token.

  vlkv generate --model mini --image page.png --prompt "read the page" \\
      --policy snapkv --keep 0.2
  vlkv generate --model llava-hf/llava-1.5-7b-hf --image cat.png \\
      --prompt "What is this?" --keep 0.1 \\
      --policy "compose(aircache, store=kivi(bits=4))"

"compose(snapkv, answer=8)" decodes eight tokens with the full cache, and observes
them too before it compresses. With --save-cache the images are compressed before the
question is known, and kept in a file; with --from-cache other questions about them
are answered from it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from vlkv import loading, saving
from vlkv.buckets import round_up
from vlkv.cache.resizing import resize
from vlkv.compression.checking import require_fit
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.begin import Begun
from vlkv.generation.decode import check_positions, check_room, decode_steps
from vlkv.generation.nan import check_tokens, check_values
from vlkv.generation.sampling import Greedy, Sample
from vlkv.inputs import Inputs
from vlkv.policies import Policy, text_of
from vlkv.processing import Processor
from vlkv.tools.commands.options import add_model_arguments, add_policy_arguments, policy_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv generate`."""
    add_model_arguments(parser)
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="an image; may be repeated")
    question = "the question; <image> marks the place of an image, \\<image> is the word itself"
    parser.add_argument("--prompt", required=True, metavar="TEXT", help=question)
    add_policy_arguments(parser)
    parser.add_argument("--save-cache", metavar="FILE", help="save the compressed cache of the images to this file")
    parser.add_argument("--from-cache", metavar="FILE", help="ask about images whose cache is in this file")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="limit on the length of the answer")
    parser.add_argument("--temperature", type=float, metavar="T", help="sample instead of taking the most likely token")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the nucleus of this probability")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from this number of most likely tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling and of random policies")
    parser.add_argument("--json", action="store_true", help="print JSON")


class _Ready(NamedTuple):
    """The cache of a prompt, perhaps with the first tokens of its answer, and the policy that made it."""

    begun: Begun
    policy: Policy
    prompt_tokens: int
    inputs: Inputs  # what was added last


def run(args: argparse.Namespace) -> Any:
    """Prints the answer on stdout and its cost on stderr, or both as JSON."""
    # All arguments are checked before weights are read.
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
    policy_key, sample_key = jax.random.split(jax.random.key(args.seed))  # the same keys as in `vlkv.generate`
    asked = None if args.save_cache else sampling.max_new_tokens  # a saved cache is compressed before any answer
    require_fit(policy, processor.config.decoder.full_layers, policy_key, max_new_tokens=asked)
    if args.save_cache is None and args.from_cache is None:
        inputs = processor(args.image or None, args.prompt)
        check_room(processor.config, inputs, sampling.max_new_tokens)
        params = jax.block_until_ready(loading.load_params(args.model, dtype=args.dtype))
        begin = time.perf_counter()
        begun = jitted.begin(
            params, inputs, policy, sampling=sampling, new_tokens=sampling.max_new_tokens, key=policy_key,
            sample_key=sample_key,
        )  # fmt: skip
        ready = _Ready(begun, policy, int(inputs.valid.sum()), inputs)
    else:
        _check_files(args)
        to_save = None if args.save_cache is None else _before_question(args, processor)
        params = jax.block_until_ready(loading.load_params(args.model, dtype=args.dtype))
        begin = time.perf_counter()
        if to_save is not None:
            _save(args, policy, params, *to_save, policy_key)
        ready = _from_file(args, sampling, params, processor)
    begun, cache = ready.begun, ready.begun.cache
    result = {
        "policy": text_of(ready.policy),
        "scope": ready.policy.scope,
        "prompt_tokens": ready.prompt_tokens,
        "kept_per_layer": np.asarray(cache.counts)[:, 0].mean(axis=1).tolist(),
        "cache_bytes": cache.bytes,
        "compressed_after": slots_of(ready.policy).answer,
        "bytes_before": begun.bytes_before,
        "slots": cache.slots,
        "kept_bytes": {name: sum(x.nbytes for x in jax.tree.leaves(kept)) for name, kept in cache.kept.items()},
    }
    tokens: list[int] = []

    def decoded() -> Iterator[int]:
        given = dict(sampling=sampling, key=sample_key, begun=begun.tokens)
        for step in decode_steps(params, cache, begun.logits, **given):
            tokens.append(int(step[0]))
            check_tokens(params, ready.inputs, np.array([tokens]))
            yield tokens[-1]

    pieces = []
    for piece in processor.pieces(decoded()):
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)
    seconds = time.perf_counter() - begin
    if args.json:
        answer = {"answer": "".join(pieces), "tokens": len(tokens)}
        return {**answer, **result, "seconds_with_compilation": round(seconds, 3)}
    print()
    each = result["kept_per_layer"]
    kept = f"{sum(each) / len(each):.1f} of {ready.prompt_tokens} prompt entries kept per layer, " if each else ""
    before = "" if begun.bytes_before is None else (
        f" ({begun.bytes_before / 2**20:.2f} MiB for the first {slots_of(ready.policy).answer} tokens)"
    )  # fmt: skip
    Console(stderr=True).print(
        f"{text_of(ready.policy, scope=True)}: {kept}cache {cache.bytes / 2**20:.2f} MiB{before}, "
        f"{seconds:.1f} s with compilation{'' if any(pieces) else '; the answer is empty'}", highlight=False,
    )  # fmt: skip
    return None


def _check_files(args: argparse.Namespace) -> None:
    if args.save_cache is not None and not args.image:
        raise InputError("--save-cache saves the cache of images: give at least one --image")
    if args.save_cache is not None and not Path(args.save_cache).parent.is_dir():
        raise InputError(f"{args.save_cache}: no such folder; make it first")
    if args.from_cache is None:
        return
    if args.save_cache is not None or args.image:
        raise InputError("--from-cache contains its images: leave out --save-cache and --image")
    if (args.policy, args.keep, args.budget, args.scope) != ("full", None, None, None):
        raise InputError("--from-cache contains its policy: leave out --policy and its options")
    saving.read_note(args.from_cache)  # whether there is such a file


def _before_question(args: argparse.Namespace, processor: Processor) -> tuple[Inputs, int]:
    """The images and the prompt before the question, and the capacity that question and answer need."""
    inputs = processor(args.image, args.prompt, query_agnostic=True)
    question = _question(args, processor, len(args.image))
    check_room(processor.config, inputs, int(question.valid.sum()) + args.max_new_tokens)
    # The rotation of long-RoPE depends on the capacity for question and answer, which the file does not need.
    return inputs, _added(processor, question, args.max_new_tokens)


def _save(args: argparse.Namespace, policy: Policy, params: Model, inputs: Inputs, added: int, key: jax.Array) -> None:
    """Saves the compressed cache of the images and of the prompt before the question."""
    cache, logits = jitted.prefill(params, inputs, policy, new_tokens=added, key=key)
    check_values(params, inputs, logits)
    cache = resize(cache, 1)
    note = {"images": len(args.image), "prompt_tokens": int(inputs.valid.sum())}
    saving.save_cache(args.save_cache, params, cache, policy=policy, note=note)


def _from_file(args: argparse.Namespace, sampling: Greedy, params: Model, processor: Processor) -> _Ready:
    """Loads a saved cache with the capacity that question and answer need, and adds the question."""
    file = args.from_cache or args.save_cache
    cache, (policy, note) = saving.load_cache(file, params), saving.read_note(file)
    if policy is None or "images" not in note:
        raise InputError(f"{file}: not made by --save-cache; use `vlkv.extend`")
    fed = _question(args, processor, note["images"])
    question = int(fed.valid.sum())
    check_positions(params.config, cache, question + sampling.max_new_tokens)
    cache = resize(cache, int(cache.used[0]) + _added(processor, fed, sampling.max_new_tokens))
    cache, logits = jitted.extend(params, cache, fed)
    return _Ready(Begun(cache=cache, logits=logits), policy, note["prompt_tokens"] + question, fed)


def _question(args: argparse.Namespace, processor: Processor, images: int) -> Inputs:
    """The part of the prompt after the last image."""
    before = processor.prompts.before_question(args.prompt, images)
    return processor.extension([before], [processor.prompts.write(args.prompt, images)])


def _added(processor: Processor, question: Inputs, max_new_tokens: int) -> int:
    """The capacity for a question and its answer, rounded up so that few sizes are compiled."""
    return round_up(int(question.valid.sum()), processor.buckets.text) + max_new_tokens
