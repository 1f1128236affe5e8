"""Ask your own questions under several policies: a table, a JSON and a plot of quality against bytes and speed.

  vlkv eval questions.jsonl --model mini --policy full snapkv h2o \\
      --keep 0.2 0.1 --scope vision --out results
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.tree import leaves
from rich.console import Console

from vlkv import loading
from vlkv.compression.checking import require_layers
from vlkv.errors import InputError
from vlkv.files import plain, write_json
from vlkv.policies import Full, Policy, text_of
from vlkv.processing import Processor
from vlkv.terminal import progress_bar
from vlkv.tools.benching.machine import describe
from vlkv.tools.commands.options import add_model_arguments, add_policy_arguments, named_policies_from
from vlkv.tools.commands.plots import has_matplotlib
from vlkv.tools.evaluation import fingerprint, peers, report
from vlkv.tools.evaluation.journal import Entry, Journal
from vlkv.tools.evaluation.metrics import METRICS, SELF, check_metrics
from vlkv.tools.evaluation.records import Record, Settings, read_records
from vlkv.tools.evaluation.running import run as run_all

AGNOSTIC = "compress before the question is known, once for each context"
RESULTS, PLOT = "results.json", "quality.png"
# A CPU reads all weights for each step, whether for one row or for some. Elsewhere memory is scarce: a large model may
# have too little for the prompts of several rows.
_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv eval`."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.jsonl", help="images, questions and answers, one row per line")
    add_model_arguments(parser)
    add_policy_arguments(parser, many=True)
    add("--metric", nargs="+", default=["exact"], metavar="NAME", help=f"of {', '.join(METRICS)} (default: exact)")
    judge = "also score each answer by a command that reads JSON (question, references, answer) and prints a number"
    add("--judge", metavar="COMMAND", help=judge)
    drawn = f"of two sampled answers that give the full cache's own {SELF}; 0: no sampling (default: 0.2)"
    add("--temperature", type=float, default=0.2, metavar="T", help=drawn)
    add("--frames", type=int, default=8, metavar="N", help="most frames of a video (default: 8)")
    out = "folder of the results; if it has an interrupted run, that run is resumed"
    add("--out", type=Path, required=True, metavar="FOLDER", help=out)
    batch = f"rows that are processed together (default: up to {_ROWS} on a CPU, and 1 on other devices)"
    add("--batch", type=int, metavar="N", help=batch)
    add("--max-new-tokens", type=int, default=64, metavar="N", help="limit on the length of an answer")
    add("--query-agnostic", action="store_true", help=AGNOSTIC)
    beside = "also answer questions about text by transformers with kvpress' presses (extra peers)"
    add("--against", choices=[peers.NAME], help=beside)
    add("--seed", type=int, default=0, help="seed of random policies and sampled answers")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Prints the table and the names of the result files, or returns the numbers for JSON."""
    # All input is checked before weights are read.
    metrics = list(dict.fromkeys(args.metric))
    records = read_records(args.file, answers=metrics != [SELF])
    turns = [turn for record in records for turn in record.turns]
    check_metrics(metrics, len(turns), min(len(turn.answers) for turn in turns))
    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        batch=_rows(len(records)) if args.batch is None else args.batch,
        query_agnostic=args.query_agnostic,
        perplexity="perplexity" in metrics,
        temperature=args.temperature if SELF in metrics else 0.0,
        frames=args.frames,
        seed=args.seed,
    )
    names = named_policies_from(args, lambda: loading.load_processor(args.model).config)
    plan = list(names)
    if SELF in metrics and not any(policy == Full() for policy in plan):
        raise InputError(f"metric {SELF} compares with the full cache: add full to --policy")
    check_folder(args.out)
    processor = loading.load_processor(args.model)
    theirs, reasons = peers.compared(names, processor.config, records, settings) if args.against else ({}, [])
    for policy in plan:
        require_layers(policy, processor.config.decoder.full_layers)
    console = Console(stderr=args.json)
    for reason in reasons:
        Console(stderr=True).print(f"not compared: {reason}", highlight=False, soft_wrap=True)
    facts, entries = answers(args, processor, args.file, records, plan, settings, dtype=args.dtype, theirs=list(theirs))
    with progress_bar("scoring", 1):
        labels = [*names.values(), *theirs.values()]
        summary = report.summarise(records, [*plan, *theirs], metrics, entries, args.judge, labels)
    result = {"run": facts, "machine": describe()} | summary
    title = f"{Path(args.model).name}, {args.file.name}: {summary['questions']} questions, 95 % intervals"
    files = write_results(result, args.out / RESULTS, args.out / PLOT, partial(report.plot, result, title=title))
    if args.json:
        return {name: value for name, value in result.items() if name != "answers"}
    console.print(*report.tables(result), sep="\n")
    for policy, name in theirs.items():
        columns = plan.index(policy), len(plan) + list(theirs).index(policy)
        same = sum(len({answer["said"][i] for i in columns}) == 1 for answer in result["answers"])
        said = f"{name}: {same} of {result['questions']} answers are the same as ours"
        console.print(said, highlight=False, soft_wrap=True)
    console.print(", ".join(map(str, files)), highlight=False)
    if len(files) == 1:
        console.print("no plot: that needs matplotlib (pip install matplotlib)", highlight=False)
    return None


def check_folder(out: Path) -> None:
    """Raises InputError if the results cannot be in this folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; --out is a folder for the results")


def write_results(result: dict[str, Any], file: Path, picture: Path, plot: Callable[[Path], None]) -> list[Path]:
    """Writes the results, and the plot if there is matplotlib; returns the files."""
    write_json(file, plain(result))
    if not has_matplotlib():
        return [file]
    plot(picture)
    return [file, picture]


def _rows(questions: int) -> int:
    """The rows of a batch, unless the user chooses them. Batches are about equal, because the last one is filled up."""
    return -(-questions // -(-questions // _ROWS)) if jax.default_backend() == "cpu" else 1


def answers(
    args: argparse.Namespace,
    processor: Processor,
    file: Path,
    records: Sequence[Record],
    plan: Sequence[Policy],
    settings: Settings,
    *,
    dtype: str | None = None,
    theirs: Sequence[Policy] = (),
) -> tuple[dict[str, Any], Mapping[tuple[int, int, int], Entry]]:
    """Answers all questions in the folder --out, where an interrupted run is resumed.

    The arguments are those of a command with --model and --out, the model's processor, the file of the questions, and
    those of `running.run`; `theirs` are policies that kvpress answers with, too, whose indices follow those of `plan`.

    Returns:
        What the run depends on, for the file of results, and the entries of its journal.

    Raises:
        InputError: a question cannot be used, and the message names the file and the line; or the folder has another
            run.
    """
    folder = loading.resolve(args.model)
    facts = {
        "model": {**fingerprint.of_model(folder), "dtype": dtype},
        "file": fingerprint.of_file(file),
        "pictures": fingerprint.of_pictures(records),
        "policies": [text_of(policy) for policy in plan],
        "code": fingerprint.of_code(plan),
        **dataclasses.asdict(settings),
    }
    journal = Journal(args.out, facts)
    try:
        if journal.resumed:
            Console(stderr=True).print(f"resuming after {journal.resumed} answers", highlight=False)
        asked = sum(len(record.turns) for record in records)
        with progress_bar("asking", (len(plan) + len(theirs)) * asked - journal.resumed) as advance:
            advance(0, "reading the weights", left=False)
            params = loading.load_params(folder, dtype=dtype)
            run_all(params, processor, records, plan, settings, journal, advance=advance)
            if theirs:
                kind, indices = leaves(params)[0].dtype.name, dict(enumerate(theirs, len(plan)))
                peers.run(folder, kind, processor, records, indices, settings, journal, advance)
    except InputError as error:
        raise InputError(f"{file}, {error}" if str(error).startswith("line ") else str(error)) from None
    finally:
        journal.close()
    return facts, journal.entries
