"""Ask several questions about the same images. Answers are printed token by token; an empty line or Ctrl-D ends it.

vlkv chat --model mini --image benchmarks/data/ledger/page000.png \\
    --policy snapkv --keep 0.5
vlkv chat --model Qwen/Qwen3-VL-2B-Instruct --video clip.mp4 --keep-system \\
    --policy "compose(infinipotv(budget=4096), every=1024)"

The policy compresses the images and the first question. Later questions and answers are added to the same cache.

A video may have any length: the policy selects again what the cache keeps. Questions are asked after its end, or with
--question, also during it. With "--video -" it is read from standard input, in a format that needs no seeking:
ffmpeg -i rtsp://camera -f matroska - | vlkv chat --video - --question "..." --ask-every 60 --model ...
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from vlkv import loading, policies
from vlkv.errors import InputError
from vlkv.generation.chat import Chat
from vlkv.generation.sampling import Greedy
from vlkv.processing import stream_video
from vlkv.tools.commands.options import add_model_arguments, add_policy_arguments, policy_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv chat`."""
    add_model_arguments(parser)
    parser.add_argument("--image", action="append", default=[], metavar="FILE", help="an image; may be repeated")
    parser.add_argument("--video", metavar="FILE", help="a video or a folder of frames; - for standard input")
    parser.add_argument("--fps", type=float, default=2.0, help="frames per second that are watched (default: 2)")
    parser.add_argument("--group", type=int, default=8, metavar="N", help="frames that are fed together (default: 8)")
    add = parser.add_argument
    add("--reduce", metavar="POLICY", help='drops tokens of each group before the decoder, such as "evs(keep=0.25)"')
    add("--question", action="append", default=[], metavar="TEXT", help="instead of standard input; may be repeated")
    add("--ask-every", type=float, metavar="SECONDS", help="ask --question during the video, too")
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
    if args.video == "-" and not args.question:
        raise InputError("--video - reads the video from standard input: give the questions as --question")
    if args.reduce is not None and args.video is None:
        raise InputError("--reduce drops tokens of a video: give --video, or the method as --policy")
    if args.ask_every is not None and not (args.video and args.question and args.ask_every > 0):
        raise InputError("--ask-every needs a positive number of seconds, --video and --question")
    if args.video not in (None, "-") and not Path(args.video).exists():
        raise InputError(f"--video {args.video}: no such file or folder; check the path")
    if args.image:
        processor(args.image, "x")  # raises an error for unusable images before weights are read
    params = loading.load_params(args.model, dtype=args.dtype)
    options: dict[str, Any] = {
        "keep_system": args.keep_system,
        "after_turns": args.after_turns,
        "key": jax.random.key(args.seed),
    }
    chat = Chat(params, processor, args.image or None, policy=policy, sampling=sampling, **options)
    if args.video is not None:
        _watch(chat, args)
    for question in args.question:
        _ask(chat, question)
    while not args.question and (question := _next_question()):
        try:
            _ask(chat, question)
        except InputError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error}", file=sys.stderr)


def _watch(chat: Chat, args: argparse.Namespace) -> None:
    """Watches the whole video, and asks the questions every so many seconds of it."""
    reduce = None if args.reduce is None else policies.make(args.reduce)
    frames = stream_video(sys.stdin.buffer if args.video == "-" else args.video, args.fps)
    due = args.ask_every
    for number, frame in enumerate(frames):
        if due is not None and number >= due * args.fps:
            due += args.ask_every
            for question in args.question:
                print(f"[{number / args.fps:g} s] ", end="")
                _ask(chat, question)
        chat.watch(frame, fps=args.fps, group=args.group, reduce=reduce)


def _ask(chat: Chat, question: str) -> None:
    chat.ask(question, on_text=lambda text: print(text, end="", flush=True))
    print()


def _next_question() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
