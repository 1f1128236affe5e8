"""Our methods and kvpress' presses on the same prompts of a published model: scores, agreement, entries, time, bytes.

    python -m benchmarks.real quality --out FILE
    python -m benchmarks.real quality --out FILE --questions 2 --length 1000 --task one-key paragraph

Tasks are made after RULER's definitions (benchmarks/real/tasks.py). Protocols: `question`, where the method sees the
whole prompt, and `context`, where it sees only what is before the question, as in kvpress. Both sides get the same
token ids in float32. kvpress gets the compression ratio that keeps as many entries as ours. Every answer is written to
FILE at once; the same command resumes an interrupted run, also with more questions or lengths. Needs the extra `peers`
for kvpress; without it only our side is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import vlkv
from benchmarks import torch_side
from benchmarks.real import folders, prose, tables, tasks
from benchmarks.real.answers import NEW, Ours
from benchmarks.real.methods import METHODS
from vlkv.compression.checking import needs_own_prompt
from vlkv.errors import InputError
from vlkv.processing import Processor
from vlkv.terminal import OneLineParser, guarded, progress_bar
from vlkv.tools.benching import machine
from vlkv.tools.evaluation import fingerprint
from vlkv.tools.evaluation.journal import RunFile
from vlkv.tools.evaluation.peers import Answer, Split, Theirs, split
from vlkv.tools.evaluation.records import Record

PROTOCOLS = ("question", "context")
KEY = ("protocol", "length", "task", "number", "engine", "method")  # what identifies an answer


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers what is missing, and prints the tables."""
    parser = OneLineParser(
        prog="python -m benchmarks.real quality", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="results as JSON lines")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a folder of a text model (default: SmolLM2)")
    parser.add_argument("--questions", type=int, default=12, metavar="N", help="per task (default: %(default)s)")
    parser.add_argument("--length", type=int, nargs="+", default=[1000], metavar="T")
    parser.add_argument("--keep", type=float, default=0.25, help="share of the entries (default: %(default)s)")
    parser.add_argument("--task", nargs="+", default=list(tasks.TASKS), choices=tasks.TASKS)
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--protocol", nargs="+", default=list(PROTOCOLS), choices=PROTOCOLS)
    parser.add_argument("--show", action="store_true", help="print the tables of FILE without answering anything")
    parser.add_argument("--docs", nargs="+", type=Path, default=[], metavar="FILE.md", help="write tables into these")
    return guarded(lambda: run(parser.parse_args(arguments)))


def run(args: argparse.Namespace) -> None:
    """Runs the benchmark.

    Raises:
        InputError: an argument cannot be used, or FILE belongs to another run.
    """
    if not 0 < args.keep < 1 or args.questions < 1 or min(args.length) < 1:
        raise InputError("--keep must lie in (0, 1), --questions and --length be at least 1")
    folder = args.model or folders.written()
    rows = RunFile(args.out, {
        "model": fingerprint.of_model(folder)["files"][:12], "prose": prose.fingerprint(), "keep": args.keep,
        "new": NEW, **{name: machine.describe()[name] for name in ("processor", "device", "jax")},
    }, KEY)  # fmt: skip
    try:
        if not args.show:
            _answer_all(args, folder, rows)
        tables.show(list(rows.entries.values()))
        tables.write_documents(list(rows.entries.values()), args.docs)
    finally:
        rows.close()


def _answer_all(args: argparse.Namespace, folder: Path, rows: RunFile) -> None:
    params, processor = vlkv.load(folder, dtype="float32")
    reason = torch_side.available()
    if reason is not None:
        print(f"kvpress not measured: {reason}", file=sys.stderr)
    sides: list[_OurSide | _TheirSide] = [_OurSide(Ours(params, processor), args.keep)]
    if reason is None:
        sides.append(_TheirSide(Theirs(folder), processor, rows))
    cells = [(length, number, task, protocol) for length in args.length for number in range(args.questions)
             for task in args.task for protocol in args.protocol]  # fmt: skip
    with progress_bar("questions", len(cells)) as advance:
        for length, number, task, protocol in cells:
            key = {"protocol": protocol, "length": length, "task": task, "number": number}
            todo = [[name for name in args.method if (*key.values(), side.engine, name) not in rows.entries]
                    for side in sides]  # fmt: skip
            if any(todo):
                record = tasks.record(processor, task, length, number)
                prompt = split(processor, record, agnostic=protocol == "context")
                for side, methods in zip(sides, todo, strict=True):
                    for name, seconds, answer in side.answers(prompt, methods, key):
                        rows.append([{**key, "engine": side.engine, "method": name,
                                      **_row(processor, record, prompt, answer, seconds)}])  # fmt: skip
            advance()


class _OurSide:
    engine = "vlkv"

    def __init__(self, model: Ours, keep: float) -> None:
        self.model, self.keep = model, keep

    def answers(self, prompt: Split, methods: Sequence[str], key: dict[str, Any]) -> Any:
        """Yields name, seconds of prefill, and answer for each method."""
        del key
        programs = {name: METHODS[name].program(self.keep, self.model.processor) for name in methods}
        own = {name for name, policy in programs.items() if needs_own_prompt(policy)}
        shared = self.model.prefill(prompt) if own < programs.keys() else None
        for name, policy in programs.items():
            read, seconds = self.model.prefill(prompt, policy) if shared is None or name in own else shared
            yield name, seconds, self.model.answer(prompt, read, policy)


class _TheirSide:
    engine = "kvpress"

    def __init__(self, model: Theirs, processor: Processor, rows: RunFile) -> None:
        self.model, self.stop, self.rows = model, processor.config.stop, rows

    def answers(self, prompt: Split, methods: Sequence[str], key: dict[str, Any]) -> Any:
        """Yields name, seconds of prefill, and answer for each method.

        Each press removes the share that our method removed of this prompt, so our side must answer first.
        """
        if methods:
            presses = {name: METHODS[name].press(self._removed(prompt, name, key)) for name in methods}
            made, logits, seconds = self.model.prefill(prompt.ids, presses)
            for name in methods:
                answer = self.model.answer(prompt, made.pop(name), logits, self.stop, NEW)
                yield name, seconds, answer

    def _removed(self, prompt: Split, method: str, key: dict[str, Any]) -> float:
        ours = self.rows.entries[(*key.values(), _OurSide.engine, method)]
        # kvpress rounds down or to the nearest number; a little more than ours gives the same number in both ways.
        return max(0.0, 1 - (ours["kept"] + 0.001) / len(prompt.ids))


def _row(processor: Processor, record: Record, prompt: Split, answer: Answer, seconds: float) -> dict[str, Any]:
    """What is stored of an answer."""
    text = str(processor.decode(np.array(answer.tokens)))
    margins = None if answer.margins is None else [round(x, 5) for x in answer.margins]
    return {
        "answer": text, "score": round(tasks.score(record.turns[0].answers, text), 4), "prompt": len(prompt.ids),
        "kept": round(answer.kept, 4), "bytes": answer.bytes, "prefill_seconds": round(seconds, 4),
        "compress_seconds": round(answer.compress_seconds, 4), "decode_seconds": round(answer.decode_seconds, 4),
        "tokens": answer.tokens, "margins": margins,
    }  # fmt: skip
