"""Our methods and kvpress' presses on the same prompts of a published model: scores, agreement, entries, time, bytes.

    python -m benchmarks.real quality --out FILE.jsonl
    python -m benchmarks.real quality --out FILE.jsonl --questions 2 --length 1000 --task one-key paragraph

Tasks are made after RULER's definitions (benchmarks/real/tasks.py). Protocols: `question`, where the method sees the
whole prompt, and `context`, where it sees only what is before the question, as in kvpress. Both sides get the same
token ids in float32. kvpress gets the compression ratio that keeps as many entries as ours. Every answer is written to
FILE at once; the same command resumes an interrupted run, also with more questions or lengths. Needs the extra `peers`
for kvpress; without it only our side is measured.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.real import folders, tables, tasks
from benchmarks.real.tables import METHODS
from vlkv import loading, policies
from vlkv.compression.checking import needs_own_prompt
from vlkv.compression.compose import at_keep
from vlkv.errors import InputError
from vlkv.generation import jitted
from vlkv.generation.begin import Begun
from vlkv.generation.prompt import Prompt
from vlkv.policies import Policy
from vlkv.processing import Processor
from vlkv.terminal import OneLineParser, guarded, progress_bar
from vlkv.tools.benching import machine
from vlkv.tools.evaluation import fingerprint, peers, running
from vlkv.tools.evaluation.batching import Work
from vlkv.tools.evaluation.journal import Store
from vlkv.tools.evaluation.keeps import budget
from vlkv.tools.evaluation.records import Record, Settings

NEW = 20  # tokens of an answer: two numbers of seven digits, with a token per digit, or four names of variables
PROTOCOLS = ("question", "context")
_REPEAT = ("\n\nRepeat the previous context exactly.", "\n")  # KVzip's instruction, in the parts that the press encodes
KEY = ("protocol", "length", "task", "number", "engine", "method")  # what identifies an answer


def main(arguments: Sequence[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLineParser(prog="python -m benchmarks.real quality", description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="results as JSON lines")
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
    if args.out.suffix != ".jsonl":
        raise InputError(f"--out {args.out}: the results are JSON lines; give a name that ends in .jsonl")
    folder = args.model or folders.written()
    about = {"model": fingerprint.of_model(folder)["files"][:12], "prose": tasks.fingerprint(), "keep": args.keep}
    here = {name: machine.describe()[name] for name in ("processor", "device", "jax")}
    results = Store(args.out, {**about, "new": NEW, **here}, KEY)
    try:
        if not args.show:
            _answer_all(args, folder, results)
        tables.show(results.rows)
        tables.write_documents(results.rows, args.docs)
    finally:
        results.close()


def _answer_all(args: argparse.Namespace, folder: Path, results: Store) -> None:
    params, processor = loading.load(folder, dtype="float32")
    reason = peers.available()
    if reason is not None:
        print(f"kvpress not measured: {reason}", file=sys.stderr)
    plan = [_policy(name, args.keep, processor) for name in args.method]
    engines = ("vlkv",) if reason else ("vlkv", "kvpress")
    sides = []
    for length in args.length:
        records = [tasks.record(processor, task, length, n) for n in range(args.questions) for task in args.task]
        for protocol, engine in itertools.product(args.protocol, engines):
            about = {"protocol": protocol, "length": length, "engine": engine}
            sides.append(_Side(results, about, records, args.method))
    with progress_bar("answers", sum(len(side.records) * len(plan) - side.resumed for side in sides)) as advance:
        for side in sides:
            asked = processor, side.records
            settings = Settings(max_new_tokens=NEW, query_agnostic=side.about["protocol"] == "context")
            if side.about["engine"] == "vlkv":
                running.run(params, *asked, plan, settings, side, advance=advance, compress=side.compress)
            else:
                numbered = dict(enumerate(plan))
                peers.run(folder, "float32", *asked, numbered, settings, side, advance, rounded=True)


def _policy(name: str, keep: float, processor: Processor) -> Policy:
    """A policy of methods.toml, with the ids of its instruction if it repeats the prompt."""
    policy = policies.make(METHODS[name]["policy"], **({} if name == "full" else {"keep": keep}))
    if not isinstance(policy, policies.KVzip):
        return policy
    ids = np.concatenate([processor.encode(part, begin=False) for part in _REPEAT])
    return dataclasses.replace(policy, instruction=tuple(ids.tolist()))


class _Side(Store):
    """The answers of one side to some questions, as a journal of the evaluation; they are written into the results."""

    def __init__(
        self, results: Store, about: dict[str, Any], records: Sequence[Record], methods: Sequence[str]
    ) -> None:
        super().__init__(None, {}, ("row", "turn", "policy"))
        self.results, self.about, self.records, self.methods = results, about, records, methods
        self.measured: dict[tuple[int, int], dict[str, Any]] = {}  # of our caches, by row and policy
        cells = itertools.product(range(len(records)), range(len(methods)))
        held = {cell: results.entries.get(results.key_of(self._key(*cell))) for cell in cells}
        self.entries = {(row, 0, policy): answer for (row, policy), answer in held.items() if answer is not None}
        self.resumed = len(self.entries)

    def _key(self, row: int, policy: int) -> dict[str, Any]:
        task, _, number = self.records[row].id.rpartition("-")
        cell = {**self.about, "task": task, "number": int(number), "method": self.methods[policy]}
        return {name: cell[name] for name in KEY}

    def append(self, results: Iterable[Any]) -> None:
        for entry in results:
            row, policy = entry["row"], entry["policy"]
            self.entries[row, 0, policy] = entry
            about = {**entry, **self.measured.get((row, policy), {})}
            margins = about.get("margins")
            answer = {
                "answer": entry["answer"],
                "score": round(tasks.score(self.records[row].turns[0].answers, entry["answer"]), 4),
                "prompt": about["prompt"],
                "kept": round(about["kept"], 4),
                "bytes": about["bytes"],
                "prefill_seconds": round(about["prefill_seconds"], 4),
                "compress_seconds": round(about["compress_seconds"], 4),
                "decode_seconds": round(entry["seconds"], 4),
                "tokens": entry["ids"],
                "margins": None if margins is None else [round(x, 5) for x in margins],
            }
            self.results.append([{**self._key(row, policy), **answer}])

    def compress(self, work: Work, plan: Sequence[Policy], todo: Sequence[int]) -> Iterator[tuple[int, int, Begun]]:
        """Our caches of one prompt. The number of entries is rounded down, so that all layers have equally many."""
        length, new = int(work.inputs.valid.sum()), work.new_tokens
        prompts: dict[Policy | None, tuple[Prompt, float]] = {}
        for i in todo:
            program = plan[i]  # serves prompts of all lengths
            reader = program if needs_own_prompt(program) else None
            if reader not in prompts:
                prompts[reader] = _timed(jitted.read_prompt, work.params, work.inputs, reader, new_tokens=new)
            prompt, prefill_seconds = prompts[reader]
            keep = None if program.keep is None else max(1, int(program.keep * length)) / length
            table = budget(program if keep is None else at_keep(program, keep), program, prompt)
            fill, key = jitted.fill_cache_with, jax.random.key(0)
            cache, seconds = _timed(fill, prompt, program, table, new_tokens=new, key=key)
            size = sum(x.nbytes for x in jax.tree.leaves((cache.k, cache.v)))
            kept = float(np.mean(np.asarray(cache.counts)))
            times = {"prefill_seconds": prefill_seconds, "compress_seconds": seconds}
            self.measured |= {(row, i): {"prompt": length, "kept": kept, **times} for row in work.batch.rows}
            yield i, size, Begun(cache=cache, logits=prompt.logits)


def _timed(function: Any, *arguments: Any, **options: Any) -> tuple[Any, float]:
    """The result and the seconds, without those of compilation."""
    while True:
        programs, begin = function._cache_size(), time.perf_counter()
        result = jax.block_until_ready(function(*arguments, **options))
        if function._cache_size() == programs:
            return result, time.perf_counter() - begin
