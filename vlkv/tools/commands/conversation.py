"""Ask several questions about the same images. Answers are printed token by token; an empty line or Ctrl-D ends it.

vlkv chat --model mini --image benchmarks/data/ledger/page000.png \\
    --policy snapkv --keep 0.5

The policy compresses the images and the first question. Later questions and answers are added to the same cache.
"""

import argparse
import sys

import jax

from vlkv import loading
from vlkv.chat import Chat
from vlkv.errors import InputError
from vlkv.generation.sampling import Greedy
from vlkv.tools.commands.options import policy_from


def run(args: argparse.Namespace) -> None:
    """Reads questions from stdin and writes answers to stdout."""
    processor = loading.load_processor(args.model)
    if args.no_thinking:
        processor = processor.with_template(enable_thinking=False)
    policy = policy_from(args, lambda: processor.config)
    sampling = Greedy(max_new_tokens=args.max_new_tokens)
    if args.image:
        processor(args.image, "x")  # raises an error for unusable images before weights are read
    params = loading.load_params(args.model, dtype=args.dtype)
    chat = Chat(params, processor, args.image or None, policy=policy, sampling=sampling, key=jax.random.key(args.seed))
    while question := _next_question():
        try:
            chat.ask(question, on_text=lambda text: print(text, end="", flush=True))
            print()
        except InputError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error}", file=sys.stderr)


def _next_question() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
