"""Ask several questions about the same images. Answers are printed token by token; an empty line or Ctrl-D ends it.

vlkv chat --model mini --image benchmarks/data/ledger/page000.png \\
    --policy snapkv --keep 0.5

The policy compresses the images and the first question. Later questions and answers are added to the same cache.
"""

import argparse
import sys
from typing import Any

import jax

from vlkv import loading
from vlkv.chat import Chat
from vlkv.errors import InputError
from vlkv.generation.sampling import Greedy
from vlkv.tools.commands.options import add_model_arguments, add_policy_arguments, policy_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv chat`."""
    add_model_arguments(parser)
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="an image; may be repeated")
    add_policy_arguments(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="limit on the length of an answer")
    thinking = "enable_thinking=False for the chat template: answer without reasoning"
    parser.add_argument("--no-thinking", action="store_true", help=thinking)
    parser.add_argument("--seed", type=int, default=0, help="seed of random policies")
    parser.add_argument("--keep-system", action="store_true", help="always keep the system prompt")
    again = 'select entries again after each answer, with a policy such as "compose(snapkv(budget=512), every=128)"'
    parser.add_argument("--after-turns", action="store_true", help=again)


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
    options: dict[str, Any] = {
        "keep_system": args.keep_system,
        "after_turns": args.after_turns,
        "key": jax.random.key(args.seed),
    }
    chat = Chat(params, processor, args.image or None, policy=policy, sampling=sampling, **options)
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
