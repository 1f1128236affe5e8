"""Writes a published text model as a folder into the user's cache; or measures on SmolLM2-135M-Instruct.

    python -m benchmarks.real [NAME]     write the folder if it is missing, and print its path
    python -m benchmarks.real quality    our methods and kvpress' presses on made tasks; see --help
    python -m benchmarks.real questions  the made tasks as questions for `vlkv eval` and `vlkv frontier`; see --help

Nothing is downloaded: the weights are those of Python packages, GGUF files in 4 bits, which transformers reads. NAME is
SmolLM2-135M-Instruct (Apache-2.0) or gemma-3-270m (Gemma Terms of Use; only tests use it).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.milebench import write
from benchmarks.real import folders, quality, tasks
from vlkv import loading
from vlkv.errors import InputError
from vlkv.terminal import OneLineParser, guarded

_ONE_ANSWER = [name for name in tasks.TASKS if name not in ("several-values", "variables", "common-words")]


def model(arguments: Sequence[str]) -> int:
    parser = OneLineParser(
        prog="python -m benchmarks.real", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {checkpoint.name: checkpoint for checkpoint in folders.CHECKPOINTS.values()}
    parser.add_argument("name", nargs="?", default=folders.SMOLLM2.name, choices=names, help="(default: %(default)s)")
    args = parser.parse_args(arguments)
    return guarded(lambda: str(folders.written(names[args.name])))


def questions(arguments: Sequence[str]) -> int:
    """Writes the made tasks as a file of questions. The default ones have one answer each, scored by `needle`."""
    parser = OneLineParser(prog="python -m benchmarks.real questions", description=questions.__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--model", type=Path, metavar="DIR", help="whose tokens are counted (default: SmolLM2)")
    parser.add_argument("--questions", type=int, default=20, metavar="N", help="per task (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1000, metavar="T", help="(default: %(default)s)")
    several = f"(default: {' '.join(_ONE_ANSWER)})"
    parser.add_argument("--task", nargs="+", default=_ONE_ANSWER, choices=tasks.TASKS, help=several)
    args = parser.parse_args(arguments)
    return guarded(lambda: _write(args))


def _write(args: argparse.Namespace) -> str:
    if args.questions < 1 or args.length < 1:
        raise InputError("--questions and --length must be at least 1")
    processor = loading.load_processor(args.model or folders.written())
    asked = [(task, number) for number in range(args.questions) for task in args.task]
    return write(args.out, map(tasks.row, (tasks.record(processor, task, args.length, n) for task, n in asked)))


_COMMANDS = {"quality": quality.main, "questions": questions}

if __name__ == "__main__":
    name, *rest = [*sys.argv[1:], ""]
    sys.exit(_COMMANDS[name](rest[:-1]) if name in _COMMANDS else model(sys.argv[1:]))
