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

from benchmarks import scripts
from benchmarks.milebench import write
from benchmarks.real import folders, quality, tasks
from vlkv import loading
from vlkv.errors import InputError

_ONE_ANSWER = [name for name in tasks.TASKS if name not in ("several-values", "variables", "common-words")]


def model(arguments: Sequence[str]) -> int:
    """Writes a folder and prints its path."""
    names = {checkpoint.name: checkpoint for checkpoint in folders.CHECKPOINTS.values()}
    changes = {"name": {"choices": list(names), "default": folders.SMOLLM2.name}}
    return scripts.run(lambda args: str(folders.written(names[args.name])), "real", __doc__, arguments, changes)


def questions(arguments: Sequence[str]) -> int:
    """Writes the made tasks as a file of questions. The default ones have one answer each, scored by `needle`."""
    changes = {"--task": {"choices": list(tasks.TASKS), "default": _ONE_ANSWER}}
    return scripts.run(_write, "real questions", questions.__doc__, arguments, changes)


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
