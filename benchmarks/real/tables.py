"""Tables of the results of `benchmarks.real quality`, on the screen and in the documents."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import documents
from benchmarks.documents import line, rule
from vlkv.tools.evaluation.statistics import wilson

METHODS: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("methods.toml").read_text())
RESULTS = Path(__file__).parents[1] / "results" / "real.jsonl"
LATER = RESULTS.with_name("real_later.jsonl")
FRONTIER = RESULTS.with_name("real_frontier.json")
DOCUMENTS = ("README.md", "docs/quality.md")
MARKED = documents.marked("real")
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
        if "difference" in method and any(row["method"] == name and row["engine"] == "kvpress" for row in rows):
            console.print(f"{name}: {method['difference']}")


def write_documents(rows: Sequence[Row], files: Iterable[Path]) -> None:
    documents.write(files, "real", lambda name: documented(rows, name))


def documented(rows: Sequence[Row], name: str, length: int = 1000) -> str:
    """A table in Markdown, with both sides in a row, of prompts of `length` tokens.

    `name` is a protocol; "summary", the first columns of the table for "question"; "later", the same for the methods in
    `LATER`; or "transfer", compositions at equal bytes, from `FRONTIER`.
    """
    if name == "transfer":
        return _transfer(json.loads(FRONTIER.read_text())["points"])
    if name == "later":
        rows = [json.loads(line) for line in LATER.read_text().splitlines()[1:]]
    protocol, columns = {"summary": ("question", 4), "later": ("question", 7)}.get(name, (name, 7))
    both = pairs(row for row in rows if (row["length"], row["protocol"]) == (length, protocol))
    header = "method", "vlkv, % [95 %]", "kvpress, %", "same answers", "entries", "MiB, vlkv", "MiB, kvpress"
    lines = [line(*header[:columns]), rule(columns)]
    for method in METHODS:
        sides = list(zip(*(pair for pair in both if pair.ours["method"] == method), strict=True))
        if sides:
            ours, theirs = sides
            same = sum(Pair(*pair).first_difference is None for pair in zip(ours, theirs, strict=True))
            mib = (f"{_mean(side, 'bytes') / 2**20:.1f}" for side in sides)
            cells = _score(ours), f"{100 * _mean(theirs, 'score'):.1f}", f"{same} of {len(ours)}"
            lines.append(line(*(method, *cells, f"{_mean(ours, 'kept'):.0f}", *mib)[:columns]))
    return "\n".join(lines)


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _score(rows: Sequence[Row]) -> str:
    mean = _mean(rows, "score")
    return documents.interval(mean, *wilson(mean, len(rows)))


def _methods(rows: Sequence[Row], title: str) -> Table:
    columns = "score, % [95 %]", "questions", "same answers", "as full cache", "kept", "KiB"
    table = Table("method", "side", *columns, "prefill s", "compress s", "ms/token", title=title)
    both = pairs(rows)
    for method, engine, cell in _cells(rows):
        alike = [pair.first_difference is None for pair in both if pair.ours["method"] == method]
        full = next((held for name, side, held in _cells(rows) if (name, side) == ("full", engine)), [])
        answers = {(row["task"], row["number"]): row["answer"] for row in full}
        exact = [row["answer"] == answers.get((row["task"], row["number"])) for row in cell if full]
        steps = sum(max(0, len(row["tokens"]) - 1) for row in cell)
        prefill, compress = (np.median([row[f"{part}_seconds"] for row in cell]) for part in ("prefill", "compress"))
        same = f"{sum(alike)} of {len(alike)}" if alike and engine == "kvpress" else ""
        as_full = f"{100 * np.mean(exact):.0f} %" if exact else ""
        kept = f"{_mean(cell, 'kept'):.1f}", f"{_mean(cell, 'bytes') / 1024:.0f}"
        step = f"{1000 * sum(row['decode_seconds'] for row in cell) / steps:.1f}" if steps else ""
        times = f"{prefill:.2f}", f"{compress:.3f}", step
        table.add_row(method, engine, escape(_score(cell)), str(len(cell)), same, as_full, *kept, *times)
    return table


def _tasks(rows: Sequence[Row], title: str) -> Table:
    names = list(dict.fromkeys(row["task"] for row in rows))
    table = Table("method", "side", *names, title=title)
    for method, engine, cell in _cells(rows):
        scores = [[row["score"] for row in cell if row["task"] == name] for name in names]
        table.add_row(method, engine, *(f"{100 * np.mean(each):.0f}" if each else "" for each in scores))
    return table


def _differences(different: Sequence[Pair]) -> Table:
    table = Table("question", "method", "token", "margin", "ours", "kvpress", title="answers that differ")
    for pair in different:
        place = " ".join(str(pair.ours[name]) for name in ("length", "protocol", "task", "number"))
        said = (repr(side["answer"][:60]) for side in pair)
        table.add_row(place, pair.ours["method"], str(pair.first_difference), f"{pair.margin:.3g}", *said)
    return table


def _cells(rows: Sequence[Row]) -> list[tuple[str, str, list[Row]]]:
    """The rows of each method and side, in the order of `METHODS` and with our side first."""
    cells = ((method, engine) for method in METHODS for engine in ("vlkv", "kvpress"))
    held = ((*cell, [row for row in rows if (row["method"], row["engine"]) == cell]) for cell in cells)
    return [cell for cell in held if cell[2]]


def _transfer(points: Sequence[dict[str, Any]]) -> str:
    """What `vlkv frontier` has measured: a row per method and bits, a column per number of bytes."""
    full, compressed = points[0], points[1:]
    shares = sorted({round(point["bytes"], 2) for point in compressed}, reverse=True)
    lines = [line("method", "bits", *(f"{share:.0%} of the bytes, % [95 %]" for share in shares))]
    lines += [line(*["---"] * (2 + len(shares))), line("`Full`", "16", *[_quality(full)] * len(shares))]
    for name, bits in dict.fromkeys((point["name"], point["bits"]) for point in compressed):
        same = [point for point in compressed if (point["name"], point["bits"]) == (name, bits)]
        cells = {round(point["bytes"], 2): _quality(point) for point in same}
        lines.append(line(f"`{name}`", str(bits), *(cells[share] for share in shares)))
    return "\n".join(lines)


def _quality(point: dict[str, Any]) -> str:
    return documents.interval(point["quality"], point["low"], point["high"], 0)
