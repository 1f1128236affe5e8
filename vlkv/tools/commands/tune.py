"""Choose how a method's scores are smoothed: answer your questions with every kernel at equal bytes, and take the best.

  vlkv profile questions.jsonl --model DIR --what drift --out drift.json
  vlkv tune questions.jsonl --model DIR --drift drift.json --bytes 0.1 \\
      --out tuned

A batch is prefilled once for all kernels. Use questions like those you will ask, but not the same: the best kernel of
many looks better on the questions that chose it than on others. An interrupted run is resumed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vlkv import loading
from vlkv.compression.checking import require_layers
from vlkv.compression.smooth import read_kernel
from vlkv.errors import InputError
from vlkv.files import write_json
from vlkv.policies import Full, Policy, Smooth, compose, text_of
from vlkv.tools.commands.evaluate import answers, check_folder
from vlkv.tools.commands.options import policy_of
from vlkv.tools.evaluation import curves
from vlkv.tools.evaluation.keeps import at_bytes
from vlkv.tools.evaluation.records import Settings, read_records
from vlkv.tools.evaluation.report import summarise

RESULTS = "tuned.json"
_LINES = tuple((0, i, 1.0) for i in range(8)) + tuple((i, 0, 1.0) for i in range(1, 8))
# Sizes or offsets, and whether they are one-sided.
ON_TEXT: dict[str, tuple[Any, bool]] = {
    **{str(n): (n, False) for n in (3, 5, 9, 17)},
    **{f"{n} before": (n, True) for n in (2, 4, 6, 8, 16, 32)},
}
ON_GRID: dict[str, tuple[Any, bool]] = {
    **{str(n): (n, False) for n in (5, 9)},
    **{f"{n} before": (n, True) for n in (4, 8, 16)},
    **{f"{n} x {n}": ((n, n), False) for n in (3, 7)},
    **{f"{n} x {n} before": ((n, n), True) for n in (4, 8)},
    "line and column of 8 before": (_LINES, False),
}


def kernels(*, grid: bool, measured: str | None = None) -> dict[str, Smooth]:
    """The candidates by name: ten fixed kernels, for images or for text, and a measured one, each with both poolings.

    `measured` is a file of `vlkv profile --what drift`; None: only the fixed ones.
    """
    fixed = ON_GRID if grid else ON_TEXT
    shapes = {**({} if measured is None else {"measured": (measured, False)}), **fixed}
    return {f"{name}, {pooling}": Smooth(kernel, one_sided=one_sided, pooling=pooling)
            for name, (kernel, one_sided) in shapes.items() for pooling in ("max", "avg")}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vlkv tune`."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE.jsonl", help="questions with answers, as for eval")
    add("--model", required=True, metavar="DIR", help="a folder, a hub id, or mini")
    policy = "the method, without smoothing of its own (default: 'snapkv(window=8, kernel=1)')"
    add("--policy", default="snapkv(window=8, kernel=1)", metavar="NAME", help=policy)
    add("--bytes", type=float, default=0.1, metavar="SHARE", help="of the full cache in 16 bits (default: 0.1)")
    add("--bits", type=int, default=4, metavar="N", help="bits per number (default: 4)")
    add("--drift", metavar="FILE", help="a kernel from `vlkv profile --what drift`, to compare, too")
    add("--metric", default="exact", metavar="NAME", help=f"one of {', '.join(curves.QUALITIES)} (default: exact)")
    add("--batch", type=int, default=1, metavar="N", help="rows that are prefilled together (default: 1)")
    add("--max-new-tokens", type=int, default=20, metavar="N", help="limit of an answer (default: 20)")
    add("--out", type=Path, default=Path("tuned"), metavar="FOLDER", help="(default: tuned)")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> Any:
    """Answers with every kernel, prints the kernels by quality, and the best one as a line of Python."""
    if not 0 < args.bytes <= 1:
        raise InputError(f"--bytes {args.bytes} must lie in (0, 1]")
    curves.check_quality(args.metric)
    check_folder(args.out)
    records, processor = read_records(args.file), loading.load_processor(args.model)
    grid = any(record.images or record.videos for record in records)
    base = policy_of(args.policy, {"keep": 0.1, "scope": "vision" if grid else "all"}, lambda: processor.config)
    smooths = kernels(grid=grid, measured=args.drift)
    named: dict[str, Policy] = {name: compose(base, smooth=smooth) for name, smooth in smooths.items()}
    named = {"Full": Full(), **named, "none": base}
    layers, head_dim = processor.config.decoder.full_layers, processor.config.decoder.head_dim
    plan = [policy if name == "Full" else at_bytes(policy, args.bytes, args.bits, head_dim=head_dim)
            for name, policy in named.items()]  # fmt: skip
    for policy in plan:
        require_layers(policy, layers)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(max_new_tokens=args.max_new_tokens, batch=min(args.batch, len(records)))
    facts, entries = answers(args, processor, args.file, records, plan, settings)
    rows = summarise(records, plan, [args.metric], entries, names=list(named))["rows"]
    codes = [_code(policy, args.drift) for policy in plan]
    points = [{"name": name, "quality": row[args.metric], "interval": row["intervals"][args.metric], "code": code}
              for name, code, row in zip(named, codes, rows, strict=True)]  # fmt: skip
    # Ties: the first, which is a measured kernel if there is one, because that has seen more than these answers.
    best = max(points[1:], key=lambda point: point["quality"])
    equal = sum(point["quality"] == best["quality"] for point in points[1:]) - 1
    result = {"run": facts, "metric": args.metric, "bytes": args.bytes, "points": points, "best": best}
    write_json(args.out / RESULTS, result)
    if args.json:
        return result
    console = Console()
    table = Table("kernel", args.metric, "95 %", title=f"{len(records)} questions, {args.bytes:.0%} of the bytes")
    for point in sorted(points, key=lambda point: -point["quality"]):
        low, high = point["interval"] or (point["quality"],) * 2
        ends = f"{100 * low:.0f} to {100 * high:.0f}"
        table.add_row(escape(point["name"]), f"{100 * point['quality']:.1f}", ends)
    console.print(table)
    ties = f" (equal with {equal} more: ask more or harder questions)" if equal else ""
    console.print(f"best: {best['name']}{ties}, {args.out / RESULTS}", highlight=False, soft_wrap=True)
    console.out(f"from vlkv import policies; policy = policies.make({best['code']!r})", highlight=False)
    return None


def _code(policy: Policy, measured: str | None) -> str:
    """The policy as text, with the file of a measured kernel in place of its many weights."""
    text = text_of(policy)
    return text if measured is None else text.replace(repr(read_kernel(Path(measured))), repr(measured))
