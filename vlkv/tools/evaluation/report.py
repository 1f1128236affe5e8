"""Summarises a run: numbers per policy as a dictionary, a table and a plot."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.files import replacing
from vlkv.policies import Full, text_of
from vlkv.tools.evaluation.curves import errors
from vlkv.tools.evaluation.journal import Entry
from vlkv.tools.evaluation.metrics import FRACTIONS, LOWER_IS_BETTER, chosen
from vlkv.tools.evaluation.records import Record, Scored
from vlkv.tools.evaluation.statistics import difference, interval


def summarise(
    records: Sequence[Record],
    plan: Sequence[Policy],
    metrics: Sequence[str],
    entries: Mapping[tuple[int, int, int], Entry],
    judge: str | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The numbers of each policy with 95 % intervals, and the answers of all policies to each question.

    `from_full` has the difference of each metric from the full cache, paired by questions, if the full cache is asked.
    `entries` are those of the journal of a complete run. `judge` is a command that scores an answer; InputError is
    raised if it fails. `names` are those of the policies in tables and plots; None: their texts.
    """
    asked = [(row, turn) for row, record in enumerate(records) for turn in range(len(record.turns))]
    full = next((i for i, policy in enumerate(plan) if policy == Full()), None)
    measured = chosen(metrics, judge)
    columns, rows = [], []
    for i, policy in enumerate(plan):
        scored = [
            _scored(records[row], turn, entries[row, turn, i], None if full is None else entries[row, turn, full])
            for row, turn in asked
        ]
        columns.append({name: metric.columns(scored) for name, metric in measured.items()})
        about = {
            "policy": text_of(policy),
            "name": text_of(policy, scope=True) if names is None else names[i],
            **{name: getattr(policy, name) for name in ("keep", "budget", "scope")},
            **{name: metric.value(columns[i][name]) for name, metric in measured.items()},
            "from_full": {},
            "intervals": {name: interval(metric, columns[i][name]) for name, metric in measured.items()},
            "compressed_after": slots_of(policy).answer,
        }
        rows.append(about | _cost([entries[row, turn, i] for row, turn in asked]))
    for i, row in enumerate(rows):
        if full is not None and i != full:
            row["from_full"] = {
                name: difference(metric, columns[i][name], columns[full][name]) for name, metric in measured.items()
            }
    questions = [
        {
            "id": records[row].id,
            "turn": turn,
            "question": records[row].turns[turn].question,
            "answers": list(records[row].turns[turn].answers),
            "said": [entries[row, turn, i]["answer"] for i in range(len(plan))],
        }
        for row, turn in asked
    ]
    return {"questions": len(asked), "metrics": list(measured), "rows": rows, "answers": questions}


def _scored(record: Record, turn: int, entry: Entry, reference: Entry | None) -> Scored:
    """An answer as metrics get it; `reference` is that of the full cache, if it was asked."""
    asked, full = record.turns[turn], () if reference is None else tuple(entry["drawn"]) or (reference["answer"],)
    likely = entry["log_probability"], entry["reference"]
    return Scored(entry["answer"], asked.answers, *likely, asked.question, record.dataset, record.images, full)


def _cost(answers: Sequence[Entry]) -> dict[str, float | None]:
    """Bytes of the cache and speed; NaN if no answer has needed a step."""
    # The first token after a prefill or a compression needs no step.
    steps = sum(max(0, entry["tokens"] - entry["begun"] - 1) for entry in answers)
    return {
        "cache_bytes": sum(entry["bytes"] for entry in answers) / len(answers),
        "bytes_before": sum(entry["bytes_before"] for entry in answers) / len(answers) or None,
        "tokens_per_second": steps / sum(entry["seconds"] for entry in answers) if steps else math.nan,
    }


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """A table with one row per policy, and one of the differences from the full cache, if it was asked."""
    late = any(row["bytes_before"] for row in result["rows"])
    percent = [name for name in result["metrics"] if name in FRACTIONS]
    title = f"{result['questions']} questions, 95 % intervals"
    title += f"; {', '.join(percent)} in percent" if percent else ""
    output = _table(title, "keep", "scope", *result["metrics"], "KiB", *(["KiB before"] if late else []), "tokens/s")
    for row in result["rows"]:
        values = [_cell(name, row[name], row["intervals"][name]) for name in result["metrics"]]
        sizes = [row["cache_bytes"], *([row["bytes_before"]] if late else [])]
        values += ["" if size is None else f"{size / 1024:.1f}" for size in sizes]
        output.add_row(*_first(row), row["scope"], *values, f"{row['tokens_per_second']:.0f}")
    yield output
    compared = [row for row in result["rows"] if row["from_full"]]
    if compared:
        output = _table(
            "difference from the full cache on the same questions, 95 % intervals", "keep", *result["metrics"]
        )
        for row in compared:
            output.add_row(*_first(row), *(_cell(name, *row["from_full"][name]) for name in result["metrics"]))
        yield output


def _table(title: str, *columns: str) -> Table:
    output = Table(title=title)
    output.add_column("policy", overflow="fold")
    for name in columns:
        output.add_column(name, justify="left" if name == "scope" else "right", no_wrap=True)
    return output


def _first(row: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a policy, and its keep or budget."""
    return escape(row["name"]), f"{row['budget']} tokens" if row["keep"] is None else f"{row['keep']:g}"


def _cell(metric: str, value: float, interval: tuple[float, float] | None) -> str:
    """A value, and its interval in a second line."""
    scale, form = (100, ".1f") if metric in FRACTIONS else (1, ".4g")
    shown, *ends = (f"{scale * x:{form}}" for x in (value, *(interval or ())))
    return "\n".join([shown, *([" to ".join(ends)] if ends else [])])


def plot(result: Mapping[str, Any], file: Path, title: str) -> None:
    """Plots every metric with intervals against bytes, and without lines, because it is noisy, against speed."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415

    metrics, lines = result["metrics"], _lines(result["rows"])
    sizes = [row["cache_bytes"] for row in result["rows"]]
    figure = Figure(figsize=(11.2, 1 + 3.6 * len(metrics) + 0.1 * len(lines)), layout="constrained")
    figure.suptitle(title)
    for name, (left, right) in zip(metrics, figure.subplots(len(metrics), 2, squeeze=False, sharey="row"), strict=True):
        scale = 100 if name in FRACTIONS else 1
        for number, (method, rows) in enumerate(lines.items()):
            values = np.array([row[name] for row in rows])
            bars = scale * errors(values, [row["intervals"][name] or (row[name],) * 2 for row in rows])
            aside = 1.012 ** (number - (len(lines) - 1) / 2)  # so that intervals at equal bytes do not hide each other
            style = {"linewidth": 1, "elinewidth": 0.8, "capsize": 2, "markersize": 5, "label": method}
            style["marker"] = "os^vDP*X"[number // 10 % 8]  # matplotlib repeats its colours after ten
            for axes, x, unit, line in ((left, "cache_bytes", 1024 / aside, "-"), (right, "tokens_per_second", 1, "")):
                axes.errorbar([row[x] / unit for row in rows], scale * values, yerr=bars, linestyle=line, **style)
        left.set_xscale("log")
        wide = max(sizes) > 15 * min(sizes)
        left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide else (1, 1.5, 2, 3, 5, 7)))
        left.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:g}")
        left.xaxis.set_minor_formatter(NullFormatter())
        percent = ", %" if name in FRACTIONS else ""
        better = " (lower is better)" if name in LOWER_IS_BETTER else ""
        left.set(xlabel="allocated cache per row, KiB", ylabel=f"{name}{percent}{better}")
        fastest = np.nanmax([1e-9, *(row["tokens_per_second"] for row in result["rows"])])
        right.set(xlabel="decoded tokens per second", xlim=(0, 1.1 * fastest))
        for axes in (left, right):
            axes.grid(alpha=0.3)
    columns = max(1, min(4, 110 // max(map(len, lines))))
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, fontsize="small", loc="outside lower center", ncols=columns)
    with replacing(file) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each method, sorted by bytes."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        method = re.sub(r"(\()?(?:, )?\b(?:keep|budget)=[^,()]+(?(1)(?:, )?)", r"\1", row["name"]).replace("()", "")
        lines.setdefault(method, []).append(row)
    return {name: sorted(rows, key=lambda row: row["cache_bytes"]) for name, rows in lines.items()}
