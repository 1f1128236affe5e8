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
from vlkv.compression.candidates import Plan
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

    params: Model
    begun: Begun
    policy: Policy
    prompt_tokens: int
    inputs: Inputs  # what was added last
    since: float  # when the weights were read


def run(args: argparse.Namespace) -> Any:
    """Prints the answer on stdout and its cost on stderr, or both as JSON."""
    # All arguments are checked before weights are read.
    policy = policy_from(args, lambda: loading.load_processor(args.model).config)
    sampling = _sampling(args)
    processor = loading.load_processor(args.model)
    policy_key, sample_key = jax.random.split(jax.random.key(args.seed))  # the same keys as in `vlkv.generate`
    new_tokens = None if args.save_cache else sampling.max_new_tokens  # a saved cache is compressed before any answer
    require_fit(policy, processor.config.decoder.full_layers, policy_key, max_new_tokens=new_tokens)
    prepare = _from_prompt if args.save_cache is None and args.from_cache is None else _from_file
    ready = prepare(args, policy, sampling, processor, (policy_key, sample_key))
    begun, cache, policy = ready.begun, ready.begun.cache, ready.policy
    result = {
        "policy": text_of(policy),
        "scope": policy.scope,
        "prompt_tokens": ready.prompt_tokens,
        "kept_per_layer": np.asarray(cache.counts)[:, 0].mean(axis=1).tolist(),
        "cache_bytes": cache.bytes,
        "compressed_after": slots_of(policy).answer,
        "bytes_before": begun.bytes_before,
        "slots": cache.slots,
        "kept_bytes": {name: sum(x.nbytes for x in jax.tree.leaves(kept)) for name, kept in cache.kept.items()},
    }
    cost = _cost(ready)  # before decoding, which consumes the cache
    tokens: list[int] = []

    def decoded() -> Iterator[int]:
        options = dict(sampling=sampling, key=sample_key, begun=begun.tokens)
        for step in decode_steps(ready.params, cache, begun.logits, **options):
            tokens.append(int(step[0]))
            check_tokens(ready.params, ready.inputs, np.array([tokens]))
            yield tokens[-1]

    pieces = []
    for piece in processor.pieces(decoded()):
        pieces.append(piece)
        if not args.json:
            print(piece, end="", flush=True)
    seconds = time.perf_counter() - ready.since
    if args.json:
        answer = {"answer": "".join(pieces), "tokens": len(tokens)}
        return {**answer, **result, "seconds_with_compilation": round(seconds, 3)}
    print()
    note = f"{cost}, {seconds:.1f} s with compilation{'' if any(pieces) else '; the answer is empty'}"
    Console(stderr=True).print(note, highlight=False)
    return None


def _sampling(args: argparse.Namespace) -> Greedy:
    rules = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(args, name)) is not None}
    if not rules:
        return Greedy(max_new_tokens=args.max_new_tokens)
    return Sample(max_new_tokens=args.max_new_tokens, **rules)


def _cost(ready: _Ready) -> str:
    """The policy, and what it has kept."""
    cache, before = ready.begun.cache, ready.begun.bytes_before
    counts = np.asarray(cache.counts)[:, 0].mean(axis=1)
    kept = f"{counts.mean():.1f} of {ready.prompt_tokens} prompt entries kept per layer, " if counts.size else ""
    policy = f"{text_of(ready.policy, scope=True)}: {kept}cache {cache.bytes / 2**20:.2f} MiB"
    if before is None:
        return policy
    return f"{policy} ({before / 2**20:.2f} MiB for the first {slots_of(ready.policy).answer} tokens)"


def _from_prompt(
    args: argparse.Namespace, policy: Policy, sampling: Greedy, processor: Processor, keys: tuple[jax.Array, jax.Array]
) -> _Ready:
    inputs = processor(args.image or None, args.prompt)
    check_room(processor.config, inputs, sampling.max_new_tokens)
    params, since = _read_weights(args)
    layers, most = params.decoder.full_layers, sampling.max_new_tokens
    plan = Plan.of(policy, inputs, keys[0], layers=layers, new_tokens=most, answer=most)
    begun = jitted.begin(params, inputs, plan, sampling=sampling, key=keys[0], sample_key=keys[1])
    return _Ready(params, begun, policy, int(inputs.valid.sum()), inputs, since)


def _read_weights(args: argparse.Namespace) -> tuple[Model, float]:
    params = jax.block_until_ready(loading.load_params(args.model, dtype=args.dtype))
    return params, time.perf_counter()


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


def _from_file(
    args: argparse.Namespace, policy: Policy, sampling: Greedy, processor: Processor, keys: tuple[jax.Array, jax.Array]
) -> _Ready:
    """Loads a saved cache, or makes and saves it first, and adds the question."""
    _check_files(args)
    if args.save_cache is not None:
        inputs = processor(args.image, args.prompt, query_agnostic=True)
        question = _question(args, processor, len(args.image))
        check_room(processor.config, inputs, int(question.valid.sum()) + args.max_new_tokens)
    params, since = _read_weights(args)
    file = args.from_cache or args.save_cache
    if args.save_cache is not None:
        # The rotation of long-RoPE depends on the capacity for question and answer, which the file does not need.
        capacity = _capacity(processor, question, args.max_new_tokens)
        cache, logits = jitted.prefill(params, inputs, policy, new_tokens=capacity, key=keys[0])
        check_values(params, inputs, logits)
        note = {"images": len(args.image), "prompt_tokens": int(inputs.valid.sum())}
        saving.save_cache(file, params, resize(cache, 1), policy=policy, note=note)
    cache, (saved_policy, note) = saving.load_cache(file, params), saving.read_note(file)
    if saved_policy is None or "images" not in note:
        raise InputError(f"{file}: not made by --save-cache; use `vlkv.extend`")
    question = _question(args, processor, note["images"])
    count = int(question.valid.sum())
    check_positions(params.config, cache, count + sampling.max_new_tokens)
    cache = resize(cache, int(cache.used[0]) + _capacity(processor, question, sampling.max_new_tokens))
    cache, logits = jitted.extend(params, cache, question)
    begun = Begun(cache=cache, logits=logits)
    return _Ready(params, begun, saved_policy, note["prompt_tokens"] + count, question, since)


def _question(args: argparse.Namespace, processor: Processor, images: int) -> Inputs:
    """The part of the prompt after the last image."""
    before = processor.prompts.before_question(args.prompt, images)
    return processor.extension([before], [processor.prompts.write(args.prompt, images)])


def _capacity(processor: Processor, question: Inputs, max_new_tokens: int) -> int:
    """The capacity for a question and its answer, rounded up so that few sizes are compiled."""
    return round_up(int(question.valid.sum()), processor.buckets.text) + max_new_tokens
