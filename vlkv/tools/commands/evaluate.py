"""Ask your own questions under several policies: a table, a JSON and a plot of quality against bytes and speed.

  vlkv eval questions.jsonl --model mini --policy full snapkv h2o \\
      --keep 0.2 0.1 --scope vision --out results
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console

from vlkv import loading
from vlkv.compression.checking import require_layers
from vlkv.errors import InputError
from vlkv.policies import Full, text_of
from vlkv.terminal import track
from vlkv.tools.benching.machine import describe
from vlkv.tools.commands.options import add_model_arguments, policies_from
from vlkv.tools.evaluation import fingerprint, report
from vlkv.tools.evaluation.journal import Journal
from vlkv.tools.evaluation.metrics import METRICS, SELF, check_metrics
from vlkv.tools.evaluation.records import read_records
from vlkv.tools.evaluation.running import Settings
from vlkv.tools.evaluation.running import run as run_all

RESULTS, PLOT = "results.json", "quality.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv eval`."""
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="images, questions and answers, one row per line")
    add_model_arguments(parser)
    parser.add_argument(
        "--policy", nargs="+", default=["full"], metavar="NAME",
        help='one or several, with options as in "aircache(keep=0.1, alpha=0.5)" (default: full)',
    )  # fmt: skip
    parser.add_argument(
        "--keep", nargs="+", type=float, default=[], metavar="FRACTION",
        help="shares of the tokens to keep, for each policy whose options name neither keep nor budget",
    )  # fmt: skip
    parser.add_argument(
        "--scope",
        choices=["vision", "all"],
        help="what competes for the budget (default: the method's; vision where defaults differ)",
    )
    parser.add_argument(
        "--metric", nargs="+", default=["exact"], metavar="NAME", help=f"of {', '.join(METRICS)} (default: exact)"
    )
    parser.add_argument(
        "--judge", metavar="COMMAND",
        help="also score each answer by a command that reads JSON (question, references, answer) and prints a number",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, default=0.2, metavar="T",
        help=f"of two sampled answers that give the full cache's own {SELF}; 0: no sampling (default: 0.2)",
    )  # fmt: skip
    parser.add_argument("--frames", type=int, default=8, metavar="N", help="most frames of a video (default: 8)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER",
        help="folder of the results; if it has an interrupted run, that run is resumed",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows that are prefilled together")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="limit on the length of an answer")
    parser.add_argument(
        "--query-agnostic", action="store_true", help="compress before the question is known, once for each context"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random policies and sampled answers")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Prints the table and the names of the result files, or returns the numbers for JSON."""
    # All input is checked before weights are read.
    metrics = list(dict.fromkeys(args.metric))
    records = read_records(args.file, answers=metrics != [SELF])
    check_metrics(metrics, sum(len(record.turns) for record in records))
    settings = Settings(
        max_new_tokens=args.max_new_tokens, batch=args.batch, query_agnostic=args.query_agnostic,
        perplexity="perplexity" in metrics, temperature=args.temperature if SELF in metrics else 0.0,
        frames=args.frames, seed=args.seed,
    )  # fmt: skip
    plan = policies_from(args, lambda: loading.load_processor(args.model).config)
    if SELF in metrics and not any(policy == Full() for policy in plan):
        raise InputError(f"metric {SELF} compares with the full cache: add full to --policy")
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"{args.out}: is a file; --out is a folder for the results")
    processor = loading.load_processor(args.model)
    for policy in plan:
        require_layers(policy, processor.config.decoder.full_layers)
    folder = loading.resolve(args.model)
    args.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "model": {**fingerprint.of_model(folder), "dtype": args.dtype},
        "file": fingerprint.of_file(args.file),
        "policies": [text_of(policy) for policy in plan],
        **dataclasses.asdict(settings),
    }
    console = Console(stderr=args.json)
    journal = Journal(args.out, facts)
    try:
        if journal.resumed:
            Console(stderr=True).print(f"resuming after {journal.resumed} answers", highlight=False)
        params = loading.load_params(folder, dtype=args.dtype)
        run_all(
            params, processor, records, plan, settings, journal,
            progress=lambda batches: track(batches, "asking"),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{args.file}, {error}" if str(error).startswith("line ") else str(error)) from None
    finally:
        journal.close()
    result = {"run": facts, "machine": describe()} | report.summarise(
        records, plan, metrics, journal.entries, args.judge
    )
    report.save(result, args.out / RESULTS)
    files = [args.out / RESULTS]
    if importlib.util.find_spec("matplotlib") is not None:
        report.plot(result, args.out / PLOT)
        files.append(args.out / PLOT)
    if args.json:
        return {name: value for name, value in result.items() if name != "answers"}
    console.print(report.table(result))
    console.print(", ".join(map(str, files)), highlight=False)
    if len(files) == 1:
        console.print("no plot: that needs matplotlib (pip install matplotlib)", highlight=False)
    return None
