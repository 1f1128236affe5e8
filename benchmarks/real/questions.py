"""Writes the made tasks as a file of questions for `vlkv eval` and `vlkv frontier`.

    python -m benchmarks.real questions --out questions.jsonl --questions 20 --length 1000
    vlkv frontier questions.jsonl --model FOLDER --metric needle

The default tasks have one answer each, so that `needle` is their score.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import vlkv
from benchmarks.real import folders, tasks
from vlkv.errors import InputError
from vlkv.files import replacing
from vlkv.terminal import OneLineParser, guarded

_SEVERAL_ANSWERS = ("several-values", "variables", "common-words")


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the file and prints the number of questions."""
    parser = OneLineParser(
        prog="python -m benchmarks.real questions", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    single = [name for name in tasks.TASKS if name not in _SEVERAL_ANSWERS]
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--model", type=Path, metavar="DIR", help="whose tokens are counted (default: SmolLM2)")
    parser.add_argument("--questions", type=int, default=20, metavar="N", help="per task (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1000, metavar="T", help="(default: %(default)s)")
    parser.add_argument("--task", nargs="+", default=single, choices=tasks.TASKS, help=f"(default: {' '.join(single)})")
    return guarded(lambda: _write(parser.parse_args(arguments)))


def _write(args: argparse.Namespace) -> str:
    if args.questions < 1 or args.length < 1:
        raise InputError("--questions and --length must be at least 1")
    processor = vlkv.loading.load_processor(args.model or folders.written())
    made = [tasks.record(processor, task, args.length, number)
            for number in range(args.questions) for task in args.task]  # fmt: skip
    with replacing(args.out) as part, part.open("w") as stream:
        for record in made:
            (turn,) = record.turns
            stream.write(json.dumps({
                "id": record.id, "dataset": record.dataset, "context": record.context, "question": turn.question,
                "answer_prefix": turn.answer_prefix, "answers": turn.answers,
            }) + "\n")  # fmt: skip
    return f"{len(made)} questions: {args.out}"
