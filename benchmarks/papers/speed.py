"""Published tables of times, operations and memory: measures the same settings and prints our figures beside them.

    python -m benchmarks.papers.speed aircache-table-3 --out OUT.json [--model mini] [--batch 8] [--dry-run]
    python -m benchmarks.papers.speed lightkv-table-1 [--timed --out OUT.json]

Figures are copied as printed. Where a paper does not give a setting, `notes` says what is used instead. "k" is 1024
tokens. Every table's throughput counts decoding alone, except PrefixKV's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Printed

from benchmarks.papers.tables import Point, SpeedTable, speed_tables
from vlkv import policies
from vlkv.analysis import cost
from vlkv.errors import InputError
from vlkv.policies import Policy
from vlkv.terminal import OneLineParser, guarded
from vlkv.tools.benching import machine
from vlkv.tools.benching.measuring import measure_missing
from vlkv.tools.benching.results import Line, Results, identity
from vlkv.tools.benching.settings import Setting, Subject, check_policy, find, grid, label
from vlkv.tools.benching.tables import plan, show, sizes

_ANSWER = 5  # tokens of an answer in A-VL's Table 3, not printed: one refresh step in five gives its used cache


def shares(policy: policies.AVL, vision: int, text: int) -> tuple[float, float]:
    """Percent of the entries of a prompt that A-VL stores, and that a step of an answer attends to on average."""
    assert policy.keep is not None
    window = text if policy.text is None or policy.longest_text is None else int(policy.text * policy.longest_text)
    refresh = _ANSWER // policy.refresh / _ANSWER
    core = policy.keep if policy.core is None else policy.core
    used = refresh * policy.keep + (1 - refresh) * core
    stored, attended = (100 * (share * vision + min(text, window)) / (vision + text) for share in (policy.keep, used))
    return stored, attended


def _shares_of(point: Point) -> tuple[float, float]:
    assert isinstance(point.policy, policies.AVL)
    setting = point.setting
    return shares(point.policy, setting.vision, setting.text + setting.new - 1)  # the last token is not cached


def _answers(row: dict[str, Any]) -> np.ndarray:
    """Seconds of prefill and decoding together, of each round."""
    return np.add(row["prefill_times"], row["decode_times"])


# A printed figure, from the line of the table and a measured row.
OURS: dict[str, Callable[[Point, dict[str, Any]], float]] = {
    "prefill_seconds": lambda _, row: row["prefill_seconds"],
    "decode_seconds": lambda _, row: row["decode_seconds"],
    "tokens_per_second": lambda _, row: row["tokens_per_second"],
    "total_seconds": lambda _, row: row["prefill_seconds"] + row["decode_seconds"],
    "total_tokens_per_second": lambda _, row: (
        row["tokens_per_second"]
        * (row["decode_seconds"] + row["step_seconds"])  # the prefill gives the first token
        / (row["prefill_seconds"] + row["decode_seconds"])
    ),
    "step_milliseconds": lambda _, row: 1e3 * row["step_seconds"],
    "first_token_milliseconds": lambda _, row: 1e3 * float(np.mean(row["prefill_times"])),
    "answer_seconds": lambda _, row: float(np.mean(_answers(row))),
    "relative_decode": lambda _, row: row["to_full"]["decode"] if "to_full" in row else 1.0,
    "cache_gib": lambda _, row: row["cache_bytes"] / 2**30,
    "cache_megabytes": lambda _, row: row["cache_bytes"] / 1e6,
    "teraflops": lambda _, row: row["teraflops"],
    "stored_percent": lambda point, _: _shares_of(point)[0],
    "used_percent": lambda point, _: _shares_of(point)[1],
}


# Standard deviations of figures over the rounds, where the paper prints them. LightKV's published script divides by the
# number of rounds.
DEVIATIONS: dict[str, Callable[[dict[str, Any]], float]] = {
    "first_token_milliseconds": lambda row: 1e3 * float(np.std(row["prefill_times"])),
    "answer_seconds": lambda row: float(np.std(_answers(row))),
}


def beside(
    console: Console,
    table: SpeedTable,
    lines: Sequence[tuple[Point, Line, dict[str, Any]]],
    machine: dict[str, Any],
    *,
    timed: bool,
) -> None:
    """Prints each number of a paper with ours, and both relative to the full cache."""
    shown = Printed("model", "batch", "prompt", "new", "policy", "figure", "paper", "ours", "paper/full", "ours/full")
    full: dict[tuple[Any, ...], tuple[Point, dict[str, Any]]] = {}
    for point, (subject, setting, policy), row in lines:
        place = subject.name, point.setting
        if isinstance(policy, policies.Full):
            full[place] = point, row
        printed_figures: dict[str, float | None] = {
            name: point.figures[name] for name in table.shown(timed=timed) if name in point.figures
        }
        printed_figures = printed_figures or dict.fromkeys(table.shown(timed=timed))
        for figure, printed in printed_figures.items():
            ours = None if "error" in row else OURS[figure](point, row)
            ratios = ["", ""]
            if place in full and not isinstance(policy, policies.Full):
                of_full, base = full[place]
                if printed is not None and of_full.figures.get(figure):
                    ratios[0] = f"{printed / of_full.figures[figure]:.2f}"
                if ours is not None and "error" not in base:
                    ratios[1] = f"{ours / OURS[figure](of_full, base):.2f}"
            said = row.get("error", "") if ours is None else f"{ours:.4g}"
            if figure in DEVIATIONS and len(row.get("decode_times", ())) > 1:
                said += f" ± {DEVIATIONS[figure](row):.2g}"
            batch, prompt, _, new = sizes(setting)
            theirs = "" if printed is None else f"{printed:g}"
            words = batch, prompt, new, label(policy), figure.replace("_", " "), theirs, said
            shown.add_row(subject.name, *words, *ratios)
    where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    ours_on = f"{where}, {machine['cores']} cores, jax {machine['jax']}, {machine['commit']}"
    console.print(f"{table.title}. Paper: {table.hardware}. Ours: {ours_on}", highlight=False)
    show(console, shown)
    for note in table.notes:
        console.print(f"- {note}", highlight=False)
    changed = ["model"] if any(subject.name != point.model for point, (subject, *_), _ in lines) else []
    changed += ["prompt or tokens"] if any(setting != point.setting for point, (_, setting, _), _ in lines) else []
    if changed and timed:
        console.print(f"- not the paper's setting: different {' and '.join(changed)}", highlight=False)


def run(args: argparse.Namespace) -> Any:
    """Prints a table, or returns the same content for JSON."""
    table = speed_tables()[args.table]
    console = Console(stderr=args.json, width=None if sys.stdout.isatty() else 160)
    points, work = _work(table, args)
    lines = [(subject, setting, policy) for subject, setting, contestants in work for policy in contestants]
    if args.timed and not table.shown(timed=True):
        raise InputError(f"{args.table} prints no times: leave out --timed")
    if table.computed and not args.timed:
        rows = [
            cost.job(line[0].config, point.policy, point.setting.vision, point.setting.text, point.setting.new)
            for point, line in zip(points, lines, strict=True)
        ]
        beside(console, table, list(zip(points, lines, rows, strict=True)), machine.describe(), timed=False)
        return rows if args.json else None
    results = Results(args.out, "python -m benchmarks.papers.speed " + " ".join(sys.argv[1:]))
    if args.dry_run:
        plan(console, lines, [results.find(identity(line)) is not None for line in lines])
        return [identity(line) for line in lines] if args.json else None
    measure_missing(work, results, rounds=args.rounds or table.rounds)
    rows = [results.find(identity(line)) or {} for line in lines]
    beside(console, table, list(zip(points, lines, rows, strict=True)), results.content["machine"], timed=True)
    return results.content if args.json else None


def _work(
    table: SpeedTable, args: argparse.Namespace
) -> tuple[list[Point], list[tuple[Subject, Setting, list[Policy]]]]:
    """The chosen points, and the measurements of them in the same order."""
    known = sorted({(point.setting.batch, point.setting.prompt) for point in table.points})
    asked = {
        (batch, prompt)
        for batch, prompt in known
        if batch in (args.batch or [batch]) and prompt in (args.prompt or [prompt])
    }
    chosen = [point for point in table.points if (point.setting.batch, point.setting.prompt) in asked]
    if not chosen:
        raise InputError(f"{args.table} has no such line; batch and prompt are one of {known}")
    points, work = [], []
    for model, at in dict.fromkeys((point.model, point.setting) for point in chosen):
        lines = [point for point in chosen if (point.model, point.setting) == (model, at)]
        subject = find(args.model or model, dtype=args.dtype)
        new = at.new if args.new is None else args.new
        setting = grid(subject.config, batches=[at.batch], prompts=[at.prompt], text=at.text, new=new)[0]
        for point in lines:
            check_policy(point.policy, subject.config)
        points += lines
        work.append((subject, setting, [point.policy for point in lines]))
    return points, work


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.papers.speed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "table", choices=list(speed_tables()), metavar="TABLE", help=f"one of {', '.join(speed_tables())}"
    )
    parser.add_argument("--model", metavar="NAME", help="as in vlkv bench (default: the model of the table)")
    parser.add_argument("--batch", type=int, nargs="+", metavar="B", help="only lines with these numbers of rows")
    parser.add_argument("--prompt", type=int, nargs="+", metavar="T", help="only lines with prompts of these lengths")
    parser.add_argument("--new", type=int, metavar="S", help="generated tokens (default: those of the table)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="measurements of each (default: those of the table, or 5)"
    )
    parser.add_argument("--timed", action="store_true", help="measure the times of a table that is counted otherwise")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights")
    parser.add_argument("--out", type=Path, metavar="JSON", help="file of results, from which a run resumes")
    parser.add_argument("--dry-run", action="store_true", help="only print the plan and the bytes it needs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
