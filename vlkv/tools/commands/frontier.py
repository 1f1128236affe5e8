"""Find the method and the bits that answer best at each cache size: a table, a plot, and a line of Python for each.

  vlkv frontier --quick --out frontier
  vlkv frontier questions.jsonl --model FOLDER --policy snapkv aircache

The first asks the demo model and takes minutes; the second asks your model your own questions.
Every policy runs with and without quantisation, at equal bytes. An interrupted run is resumed.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlkv import loading
from vlkv.compression.checking import require_layers
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.mini import export
from vlkv.policies import AirCache, Full, Policy, Smooth, compose, text_of
from vlkv.processing import Processor
from vlkv.tools.benching.machine import describe
from vlkv.tools.commands.evaluate import AGNOSTIC, answers, check_folder, write_results
from vlkv.tools.commands.options import labels, policy_of, try_own
from vlkv.tools.commands.plots import check_file, require_matplotlib
from vlkv.tools.evaluation import curves, dialogue
from vlkv.tools.evaluation.keeps import at_bytes, share_of_bytes
from vlkv.tools.evaluation.records import Record, Settings, read_records
from vlkv.tools.evaluation.report import summarise

RESULTS, PLOT, QUESTIONS = "frontier.json", "frontier.png", "questions"
_METHODS = ("imgrandom", "h2o", "snapkv", "pyramidkv", "aircache", "prefixkv", "csp", "vlcache")
_TEXT_METHODS = ("random", "streamingllm", "h2o", "snapkv", "pyramidkv", "adakv", "prefixkv")
_QUICK = ("snapkv", "aircache")
_DEFAULTS: dict[str, Any] = {"bytes": [0.2, 0.1, 0.05, 0.02, 0.01], "bits": [16, 8, 4, 2], "questions": 200}
_QUICK_DEFAULTS: dict[str, Any] = {"bytes": [0.1, 0.02], "bits": [16, 4], "questions": 40}
_TEXT = AirCache(keep=0.1, window="text")
_OURS = {
    "AirCache, smoothed": compose(_TEXT, smooth=Smooth(8, one_sided=True, pooling="max")),
    "AirCache, smoothed on the grid": compose(_TEXT, smooth=Smooth((8, 8), one_sided=True, pooling="max")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv frontier`."""
    add = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE.jsonl", help="questions (default: ledger pages)")
    add("--model", default="mini", metavar="DIR", help="a folder, a hub id, or mini (default: mini)")
    methods = f"with options as in 'aircache(window=\"text\")' (default: {', '.join(_METHODS)}, and smoothed ones)"
    add("--policy", nargs="+", metavar="NAME", help=methods)
    add("--bits", nargs="+", type=int, metavar="N", help="bits per number (default: 16 8 4 2)")
    shares = "budgets, as shares of the full cache in 16 bits (default: 0.2 0.1 0.05 0.02 0.01)"
    add("--bytes", nargs="+", type=float, metavar="SHARE", help=shares)
    qualities = f"one of {', '.join(curves.QUALITIES)} (default: exact)"
    add("--metric", default="exact", metavar="NAME", help=qualities)
    add("--questions", type=int, metavar="N", help="number of ledger pages (default: 200)")
    add("--quick", action="store_true", help="defaults are few methods, budgets and pages: minutes")
    add("--out", type=Path, default=Path("frontier"), metavar="FOLDER", help="(default: frontier)")
    add("--batch", type=int, default=20, metavar="N", help="rows that are prefilled together")
    add("--max-new-tokens", type=int, default=16, metavar="N", help="limit of an answer (default: 16)")
    add("--query-agnostic", action="store_true", help=AGNOSTIC)
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Measures, prints the frontier, and draws it."""
    _fill_in(args)
    for share in args.bytes:
        if not 0 < share <= 1:
            raise InputError(f"--bytes {share} must lie in (0, 1]")
    check_folder(args.out)
    curves.check_quality(args.metric)
    if not args.json:
        require_matplotlib()
    processor = loading.load_processor(args.model)
    named = _plan(args, processor)
    file, records = _questions(args)
    args.out.mkdir(parents=True, exist_ok=True)
    check_file(args.out / PLOT, "picture", "png")
    names, _, plan = map(list, zip(*named, strict=True))
    batch = min(args.batch, len(records))
    settings = Settings(max_new_tokens=args.max_new_tokens, batch=batch, query_agnostic=args.query_agnostic)
    facts, entries = answers(args, processor, file, records, plan, settings)
    summary = summarise(records, plan, [args.metric], entries, names=names)
    first = dialogue.first_inputs(processor, [records[:1]], query_agnostic=args.query_agnostic, frames=settings.frames)
    points = []
    for (name, bits, policy), row in zip(named, summary["rows"], strict=True):
        low, high = row["intervals"][args.metric] or (row[args.metric],) * 2
        size = share_of_bytes(policy, processor.config, first[0])
        quality = {
            "quality": row[args.metric],
            "low": low,
            "high": high,
            "scope": policy.scope,
            "code": text_of(policy),
        }
        about = {key: row[key] for key in ("cache_bytes", "compressed_after", "bytes_before")}
        points.append({"name": name, "bits": bits, "bytes": size, **quality, **about})
    chosen = [(share, best) for share in args.bytes if (best := curves.best_at(points[1:], share)) is not None]
    lines = [
        {"share": share, **best, "python": f"from vlkv import policies; policy = policies.make({best['code']!r})"}
        for share, best in chosen
    ]
    about = {"run": facts, "machine": describe(), "metric": args.metric, "questions": summary["questions"]}
    result = {**about, "points": points, "best": lines}
    title = f"{Path(args.model).name}, {summary['questions']} questions, 95 % intervals"
    plot = partial(curves.plot, points[1:], title=title, label=args.metric, full=points[0]["quality"])
    write_results(result, args.out / RESULTS, args.out / PLOT, plot)
    if args.json:
        return result
    _show(points, lines, args)
    return None


def _fill_in(args: argparse.Namespace) -> None:
    if args.file is not None and args.questions is not None:
        raise InputError(f"--questions {args.questions} is a number of ledger pages, but all of {args.file} are asked")
    for name, value in (_QUICK_DEFAULTS if args.quick else _DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _questions(args: argparse.Namespace) -> tuple[Path, list[Record]]:
    """The user's file, or ledger pages that are written next to the results."""
    if args.file is not None:
        return args.file, read_records(args.file)
    if loading.resolve(args.model) != loading.MINI:
        raise InputError("give FILE.jsonl, because only the demo model has default questions")
    file = args.out / QUESTIONS / export.QUESTIONS
    if not file.exists() or len(read_records(file)) != args.questions:
        export.export(args.out / QUESTIONS, args.questions)
    return file, read_records(file)


def _plan(args: argparse.Namespace, processor: Processor) -> list[tuple[str, int, Policy]]:
    """Name, bits and policy of every point; the full cache first."""
    base: dict[str, Policy] = {}
    sees = processor.config.vision is not None
    options = {"keep": 0.1, "scope": "vision" if sees else "all"}
    texts = args.policy or (_QUICK if args.quick else _METHODS if sees else _TEXT_METHODS)
    for text, name in labels(texts).items():
        policy = policy_of(text, options, _no_profile)
        kind = type(policy).__name__
        base[kind if kind.lower() == name.lower() else name] = policy
    if args.policy is None and sees:
        base |= _OURS
    plan: list[tuple[str, int, Policy]] = [("Full", 16, Full())]
    for name, policy in base.items():
        require_layers(policy, processor.config.decoder.full_layers)
        try_own(policy, lambda: processor.config)
        at_share = partial(at_bytes, policy, head_dim=processor.config.decoder.head_dim)
        plan += [(name, bits, at_share(share, bits)) for bits in args.bits for share in args.bytes]
    return plan


def _no_profile() -> ModelConfig:
    """Stands for the model's config, which only a profile needs."""
    raise InputError("a profile is for one keep, but frontier chooses the keeps: leave out profile=")


def _show(points: list[dict[str, Any]], lines: list[dict[str, Any]], args: argparse.Namespace) -> None:
    console = Console()
    sizes = ["cache_bytes", *(["bytes_before"] if any(point["bytes_before"] for point in points) else [])]
    columns = ("method", "scope", "bits", "bytes", args.metric, "95 %", *("KiB", "KiB before")[: len(sizes)])
    table = Table(*columns, title="quality against bytes")
    on_frontier = [point["code"] for point in curves.pareto(points)]
    for point in points:
        mark = "[bold]" if point["code"] in on_frontier else ""
        about = mark + escape(point["name"]), point["scope"], str(point["bits"]), f"{point['bytes']:.1%}"
        quality = f"{mark}{100 * point['quality']:.1f}", f"{100 * point['low']:.0f} to {100 * point['high']:.0f}"
        kib = ("" if point[name] is None else f"{point[name] / 1024:.0f}" for name in sizes)
        table.add_row(*about, *quality, *kib)
    console.print(table)
    for line in lines:
        best = f"\nbest at {line['share']:.0%}: {line['name']}, {line['bits']} bits: {line['quality']:.4f}"
        console.print(best, highlight=False)
        console.out(line["python"], highlight=False)  # one line, however long
    console.print(f"\n{args.out / PLOT}, {args.out / RESULTS}", highlight=False)
