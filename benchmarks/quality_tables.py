"""Tables, documents and plot of the results of `benchmarks.quality`."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import documents
from benchmarks.documents import line, rule
from vlkv.tools.evaluation import curves

RESULTS = Path(__file__).parent / "results" / "quality.json"
DOCUMENTS = ("README.md", "docs/quality.md")
MARKED = documents.marked("quality")
NOT_MEASURED = "The demo model of this version has not been measured yet: `python -m benchmarks.quality --out FILE`."
BYTES = (0.2, 0.1, 0.05, 0.02)  # columns of the tables
EVALUATED, TUNED = 0, 7  # seeds of the questions: the reported ones, and those by which compositions were chosen
# The best compositions on the questions of the seed TUNED: on row pages, and on pages of both shapes.
ON_ROWS, ON_BOTH = "AirCache text, 8 before, max", "AirCache text, 8 x 8 before, max"
FIVE = ("AirCache", "PrefixKV", "LightKV", "CSP", "AVL")  # the papers that define this library
PAPERS = (*FIVE, "SnapKV", "H2O", "PyramidKV", "AdaKV")
SETTINGS = {
    "shorter prompts": "Methods that reduce the prompt",
    "query_agnostic": "Compressed before any question is known",
    "several": "Three pages, one of them asked about",
}
DAMAGE = {  # sections, and what their questions are about
    "damage ledger": "one entry of a ledger page",
    "damage digits": "a line, or all that is written",
    "damage unseen": "one entry, asked after the compression",
}
CONTROLS = ("Random", "ImgRandom")
HEADER = [line('method, default settings, scope="vision"', *(f"{100 * share:.0f} %" for share in BYTES)), rule(5)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints one table per section."""
    console = Console(width=150)
    columns = "policy", "bytes", "held", "exact, % [95 %]", "loss", "by place", "recall", "perplexity"
    for name in dict.fromkeys(row["section"] for row in rows):
        table = Table(*columns, title=f'{name}, scope="vision"')
        for row in (row for row in rows if row["section"] == name):
            exact = escape(documents.interval(row["exact"], row["low"], row["high"]))
            shares = (f"{row[key]:.1%}" for key in ("bytes", "held"))
            perplexity = "" if row["perplexity"] is None else f"{row['perplexity']:.3g}"
            recall, loss = f"{np.mean(row['recall']):.2f}", f"{100 * row['loss']:.1f}"
            table.add_row(row["policy"], *shares, exact, loss, _percent(row["places"]), recall, perplexity)
        console.print(table)


def write_documents(rows: Sequence[dict[str, Any]], files: Iterable[Path]) -> None:
    """Writes the tables between their marks."""
    documents.write(files, "quality", documented(rows).__getitem__)


def documented(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The tables of README and docs/quality.md by the names of their marks, from the rows of the reported seed."""
    figures = _Rows(rows)
    return {name: make(figures) if figures.rows else NOT_MEASURED for name, make in _TABLES.items()}


class _Rows:
    """The rows of the reported seed, and their figures as text."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = [row for row in rows if row["seed"] == EVALUATED]
        self.by_key = {(row["section"], row["name"], row["bits"], row["bytes"]): row for row in self.rows}

    def exact(self, section: str, name: str, share: float, bits: int = 16) -> str:
        """Exact answers in percent; empty if not measured."""
        row = self.by_key.get((section, name, bits, share))
        return "" if row is None else f"{100 * row['exact']:.1f}"

    def interval(self, section: str, name: str, share: float, bits: int = 16) -> str:
        """`exact` with its 95 % interval, and the share of entries that methods that reduce the prompt hold."""
        row = self.by_key.get((section, name, bits, share))
        if row is None:
            return ""
        held = f", holds {100 * row['held']:.0f} %" if section == "shorter prompts" and share < 1 else ""
        return documents.interval(row["exact"], row["low"], row["high"]) + held

    def answers(self, section: str) -> str:
        """A sentence with the number of answers and the full cache's quality."""
        count = len(self.by_key[section, "Full", 16, 1.0]["right"])
        return f"{count} answers, full cache {self.interval(section, 'Full', 1.0)}."

    def methods(self, section: str, only: Iterable[str] | None = None) -> list[str]:
        """Lines of a table, best at 10 % of the bytes first; with intervals unless `only` names some methods."""
        rows = [row for row in self.rows if row["section"] == section and row["bytes"] in BYTES]
        names = dict.fromkeys((row["name"], row["bits"]) for row in rows)
        chosen = [(name, bits) for name, bits in names if only is None or name in only]
        chosen.sort(key=lambda pair: -self.by_key.get((section, *pair, 0.1), {"exact": -1})["exact"])
        figure = self.interval if only is None else self.exact
        return [
            line(name if bits == 16 else f"{name}, {bits} bits", *(figure(section, name, x, bits) for x in BYTES))
            for name, bits in chosen
        ]


def _summary(figures: _Rows) -> str:
    """Some methods, others that are better, the best compositions, and what bounds them."""
    shown = figures.methods("methods", PAPERS)
    count = len(figures.by_key["methods", "Full", 16, 1.0]["right"])
    above = (
        f"This table has {len(shown)} methods: {count} answers, full cache {figures.exact('methods', 'Full', 1.0)}. "
        "[How good are the methods](docs/quality.md) has all methods, and intervals."
    )
    bounds = (
        f"For comparison: {figures.answers('baselines')} Oracle, which keeps what the answer needs and random "
        f"tokens, has {figures.interval('baselines', 'Oracle', 0.02)} at 2 %; random tokens have "
        f"{figures.interval('baselines', 'ImgRandom', 0.1)} at 10 %; the page averaged over 2 x 2 patches (25 %) has "
        f"{figures.interval('baselines', 'Downsample', 0.25)}."
    )
    right = "compositions right"
    best = (
        'With smoothed scores and 4 bits, fewer bytes are enough. If each score of `AirCache(window="text")` becomes '
        "the largest of itself and of the seven scores before it, the figures are "
        f"{figures.exact(right, ON_ROWS, 0.02, 4)} at 2 % and {figures.exact(right, ON_ROWS, 0.01, 4)} at 1 % on pages "
        f"whose values are to the right of their tags (full cache {figures.exact(right, 'Full', 1.0)}). If it becomes "
        f"the largest score of 8 x 8 patches, the figure is {figures.exact('compositions', ON_BOTH, 0.02, 4)} at 2 % "
        f"on pages of both shapes (full cache {figures.exact('compositions', 'Full', 1.0)})."
    )
    return "\n".join([above, "", *HEADER, *shown, "", *_better(figures), best, "", bounds])


def _better(figures: _Rows) -> list[str]:
    """A line with the methods whose interval at 10 % is above every method of the summary's table."""
    section = "damage ledger"
    rows = {row["name"]: row for row in figures.rows if (row["section"], row["bytes"]) == (section, 0.1)}
    shown = max((name for name in PAPERS if name in rows), key=lambda name: rows[name]["exact"], default=None)
    others = [name for name in rows if shown and name not in PAPERS and rows[name]["low"] > rows[shown]["exact"]]
    if shown is None or not others:
        return []
    others.sort(key=lambda name: -rows[name]["exact"])
    better = ", ".join(f"{name} {figures.exact(section, name, 0.1)}" for name in others)
    return [
        f"Other methods are better. On the first {len(rows[shown]['right'])} of these questions, at 10 %: {better} "
        f"({shown} {figures.exact(section, shown, 0.1)}, full cache {figures.exact(section, 'Full', 1.0)}).",
        "",
    ]


def _methods(figures: _Rows) -> str:
    return "\n".join([figures.answers("methods"), "", *HEADER, *figures.methods("methods")])


def _compositions(figures: _Rows) -> str:
    """All compositions, with and without quantisation."""
    lines = [line('composition, scope="vision"', "2 %", "1 %", "values to the right: 2 %", "1 %"), rule(5)]
    names = (row["name"] for row in figures.rows if row["section"] == "compositions" and row["name"] != "Full")
    columns = list(itertools.product(("compositions", "compositions right"), (0.02, 0.01)))
    for name, bits in itertools.product(dict.fromkeys(names), (16, 4)):
        lines.append(
            line(f"{name}, {bits} bits", *(figures.exact(section, name, share, bits) for section, share in columns))
        )
    both, right = figures.answers("compositions"), figures.answers("compositions right")
    return "\n".join([*lines, "", f"Both shapes: {both}", f"To the right: {right}"])


def _settings(figures: _Rows) -> str:
    """One table for each of the other settings that have been measured."""
    lines = []
    for section, title in SETTINGS.items():
        if (section, "Full", 16, 1.0) in figures.by_key:
            lines += [f"{title}: {figures.answers(section)}", "", *HEADER, *figures.methods(section), ""]
    return "\n".join(lines).strip()


def _damage(figures: _Rows) -> str:
    """Every method at 10 % of the bytes in each section of `DAMAGE`, best mean first; with the controls.

    A star marks a method whose interval contains the best control's figure, or lies below it.
    """
    sections = [name for name in DAMAGE if all((name, control, 16, 0.1) in figures.by_key for control in CONTROLS)]
    if not sections:
        return NOT_MEASURED
    rows = {key[:2]: row for key, row in figures.by_key.items() if key[0] in sections and key[2:] == (16, 0.1)}
    control = {section: max(rows[section, name]["exact"] for name in CONTROLS) for section in sections}

    def figure(section: str, name: str) -> str:
        row = rows.get((section, name))
        if row is None:
            return ""
        marked = name not in CONTROLS and row["low"] <= control[section]
        return figures.interval(section, name, 0.1) + (" *" if marked else "")

    names = dict.fromkeys(name for _, name in rows)
    best = sorted(names, key=lambda name: -np.mean([rows[s, name]["exact"] for s in sections if (s, name) in rows]))
    lines = [line("method at 10 %", *(DAMAGE[section] for section in sections)), rule(1 + len(sections))]
    lines.append(line("Full", *(figures.interval(section, "Full", 1.0) for section in sections)))
    return "\n".join(lines + [line(name, *(figure(section, name) for section in sections)) for name in best])


def _papers(figures: _Rows) -> str:
    header = "exact", "evidence kept, first to last layer", "right, first to sixth digit"
    lines = [line('method at 10 %, scope="vision"', *header), rule(4)]
    for name in FIVE:
        rows = (figures.by_key.get((section, name, 16, 0.1)) for section in ("methods", "shorter prompts"))
        row = next(filter(None, rows), None)
        if row is not None:
            layers = _percent(np.mean(row["recall"], axis=1))
            lines.append(line(name, f"{100 * row['exact']:.1f}", layers, _percent(row["places"])))
    return "\n".join(lines)


_TABLES: dict[str, Callable[[_Rows], str]] = {
    make.__name__[1:]: make for make in (_papers, _summary, _methods, _compositions, _settings, _damage)
}


def _percent(values: Iterable[float]) -> str:
    return " ".join(f"{100 * value:.0f}" for value in values)


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draws quality against bytes for all methods, the controls, and compositions, on pages of both shapes.

    Leaves out Oracle, which is given the position of the answer.
    """
    rows = [row for row in rows if row["seed"] == EVALUATED]
    points = [
        {
            "quality": row["exact"],
            "scope": "vision",
            **{key: row[key] for key in ("name", "bits", "bytes", "low", "high")},
        }
        for row in rows
        if row["section"] in ("damage ledger", "compositions") and row["name"] not in ("Full", "KIVI")
    ]
    full = next(row for row in rows if row["section"] == "damage ledger" and row["name"] == "Full")
    title, label = "Ledger pages: quality against bytes, 95 % intervals", "exact answers"
    curves.plot(points, file, title=title, label=label, full=full["exact"])
