"""Tables of the results of `benchmarks.real quality`, on the screen and in the documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.real.methods import METHODS
from vlkv.tools.evaluation.statistics import wilson

RESULTS = Path(__file__).parents[1] / "results" / "real.jsonl"
LATER = RESULTS.with_name("real_later.jsonl")
FRONTIER = RESULTS.with_name("real_frontier.json")
DOCUMENTS = ("README.md", "docs/quality.md")
MARKED = re.compile(r"(<!-- real: (\w+) -->\n)(.*?)(\n<!-- /real -->)", re.DOTALL)
Row = dict[str, Any]


class Pair(NamedTuple):
    """Our answer to a question and kvpress' answer to the same question with the same method."""

    ours: Row
    theirs: Row

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None if the answers are the same."""
        ours, theirs = self.ours["tokens"], self.theirs["tokens"]
        if ours == theirs:
            return None
        same = (i for i, both in enumerate(zip(ours, theirs, strict=False)) if both[0] != both[1])
        return next(same, min(len(ours), len(theirs)))

    @property
    def margin(self) -> float:
        """By how much kvpress' first other token exceeds its second best one, in logits."""
        place = self.first_difference
        assert place is not None
        return float(self.theirs["margins"][min(place, len(self.theirs["margins"]) - 1)])


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """The questions that both sides have answered."""
    held: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("protocol", "length", "task", "number", "method"))
        held.setdefault(key, {})[row["engine"]] = row
    return [Pair(both["vlkv"], both["kvpress"]) for both in held.values() if len(both) == 2]


def show(rows: Sequence[Row], width: int = 160) -> None:
    """Prints per length and protocol a table of the methods and one of the tasks, and the answers that differ."""
    console = Console(width=width)
    for length, protocol in sorted({(row["length"], row["protocol"]) for row in rows}):
        chosen = [row for row in rows if (row["length"], row["protocol"]) == (length, protocol)]
        title = f"{length} tokens, {'question seen' if protocol == 'question' else 'context first'}"
        console.print(_methods(chosen, title))
        console.print(_tasks(chosen, f"{title}: score by task, %"))
    console.print("score: mean over the questions; its interval is Wilson's, as if a score were right or wrong")
    different = [pair for pair in pairs(rows) if pair.first_difference is not None]
    if different:
        console.print(_differences(different))
    for name, method in METHODS.items():
        if method.difference and any(row["method"] == name and row["engine"] == "kvpress" for row in rows):
            console.print(f"{name}: {method.difference}")


def write_documents(rows: Sequence[Row], files: Iterable[Path]) -> None:
    """Writes the tables between their marks `<!-- real: NAME -->` and `<!-- /real -->`."""
    for file in files:
        text = MARKED.sub(lambda match: f"{match[1]}{documented(rows, match[2])}{match[4]}", file.read_text())
        file.write_text(text)


def documented(rows: Sequence[Row], name: str, length: int = 1000) -> str:
    """A table in Markdown, with both sides in a row.

    Args:
        rows: all results.
        name: a protocol; "summary", the first columns of the table for "question"; "later", the same for the methods
            in `LATER`; or "transfer", compositions at equal bytes, from `FRONTIER`.
        length: of the prompts, in tokens.
    """
    if name == "transfer":
        return _transfer(json.loads(FRONTIER.read_text())["points"])
    if name == "later":
        rows = [json.loads(line) for line in LATER.read_text().splitlines()[1:]]
    protocol, columns = {"summary": ("question", 4), "later": ("question", None)}.get(name, (name, None))
    chosen = [row for row in rows if (row["length"], row["protocol"]) == (length, protocol)]
    lines: list[tuple[str, ...]] = [
        ("method", "vlkv, % [95 %]", "kvpress, %", "same answers", "entries", "MiB, vlkv", "MiB, kvpress")
    ]
    lines.append(("---",) * len(lines[0]))
    for method in METHODS:
        both = [pair for pair in pairs(chosen) if pair.ours["method"] == method]
        if not both:
            continue
        ours, theirs = [pair.ours for pair in both], [pair.theirs for pair in both]
        mean = float(np.mean([row["score"] for row in ours]))
        low, high = wilson(mean, len(both))
        same = sum(pair.first_difference is None for pair in both)
        lines.append((
            method, f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]",
            f"{100 * np.mean([row['score'] for row in theirs]):.1f}", f"{same} of {len(both)}",
            f"{np.mean([row['kept'] for row in ours]):.0f}",
            *(f"{np.mean([row['bytes'] for row in side]) / 2**20:.1f}" for side in (ours, theirs)),
        ))  # fmt: skip
    return (
        "\n".join(f"| {' | '.join(line[:columns])} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def _methods(rows: Sequence[Row], title: str) -> Table:
    table = Table("method", "side", "score, % [95 %]", "questions", "same answers", "as full cache", "kept", "KiB",
                  "prefill s", "compress s", "ms/token", title=title)  # fmt: skip
    both = pairs(rows)
    for method, engine in _sorted(rows, "method", "engine"):
        cell = [row for row in rows if (row["method"], row["engine"]) == (method, engine)]
        mean = float(np.mean([row["score"] for row in cell]))
        low, high = wilson(mean, len(cell))
        alike = [pair.first_difference is None for pair in both if pair.ours["method"] == method]
        full = {(row["task"], row["number"]): row["answer"] for row in rows
                if (row["method"], row["engine"]) == ("full", engine)}  # fmt: skip
        exact = [
            row["answer"] == full[row["task"], row["number"]] for row in cell if (row["task"], row["number"]) in full
        ]
        steps = sum(max(0, len(row["tokens"]) - 1) for row in cell)
        table.add_row(
            method, engine, f"{100 * mean:.1f} \\[{100 * low:.1f}, {100 * high:.1f}]", str(len(cell)),
            f"{sum(alike)} of {len(alike)}" if alike and engine == "kvpress" else "",
            f"{100 * np.mean(exact):.0f} %" if exact else "",
            f"{np.mean([row['kept'] for row in cell]):.1f}", f"{np.mean([row['bytes'] for row in cell]) / 1024:.0f}",
            f"{np.median([row['prefill_seconds'] for row in cell]):.2f}",
            f"{np.median([row['compress_seconds'] for row in cell]):.3f}",
            f"{1000 * sum(row['decode_seconds'] for row in cell) / steps:.1f}" if steps else "",
        )  # fmt: skip
    return table


def _tasks(rows: Sequence[Row], title: str) -> Table:
    names = list(dict.fromkeys(row["task"] for row in rows))
    table = Table("method", "side", *names, title=title)
    for method, engine in _sorted(rows, "method", "engine"):
        cell = [row for row in rows if (row["method"], row["engine"]) == (method, engine)]
        scores = [[row["score"] for row in cell if row["task"] == name] for name in names]
        table.add_row(method, engine, *(f"{100 * np.mean(found):.0f}" if found else "" for found in scores))
    return table


def _differences(different: Sequence[Pair]) -> Table:
    table = Table("question", "method", "token", "margin", "ours", "kvpress", title="answers that differ")
    for pair in different:
        ours, theirs = pair
        place = f"{ours['length']} {ours['protocol']} {ours['task']} {ours['number']}"
        table.add_row(place, ours["method"], str(pair.first_difference), f"{pair.margin:.3g}",
                      repr(ours["answer"][:60]), repr(theirs["answer"][:60]))  # fmt: skip
    return table


def _sorted(rows: Sequence[Row], *names: str) -> list[tuple[Any, ...]]:
    """The combinations of the fields, in the order of `METHODS` and with our side first."""
    found = dict.fromkeys(tuple(row[name] for name in names) for row in rows)
    order = list(METHODS)
    return sorted(found, key=lambda key: (order.index(key[0]), key[1] != "vlkv"))


def _transfer(points: Sequence[dict[str, Any]]) -> str:
    """What `vlkv frontier` has measured: a row per method and bits, a column per number of bytes."""
    full, compressed = points[0], points[1:]
    shares = sorted({round(point["bytes"], 2) for point in compressed}, reverse=True)
    lines = [("method", "bits", *(f"{share:.0%} of the bytes, % [95 %]" for share in shares))]
    lines += [("---",) * len(lines[0]), ("`Full`", "16", *[_interval(full)] * len(shares))]
    for name, bits in dict.fromkeys((point["name"], point["bits"]) for point in compressed):
        same = [point for point in compressed if (point["name"], point["bits"]) == (name, bits)]
        cells = {round(point["bytes"], 2): _interval(point) for point in same}
        lines.append((f"`{name}`", str(bits), *(cells[share] for share in shares)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _interval(point: dict[str, Any]) -> str:
    return f"{100 * point['quality']:.0f} [{100 * point['low']:.0f}, {100 * point['high']:.0f}]"
