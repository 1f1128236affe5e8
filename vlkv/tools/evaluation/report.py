"""Summarises a run: numbers per policy as a dictionary, a table and a plot."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vlkv.compression.policy import Policy
from vlkv.files import replacing
from vlkv.policies import Full, text_of
from vlkv.tools.evaluation.journal import Entry
from vlkv.tools.evaluation.metrics import FRACTIONS, LOWER_IS_BETTER, score
from vlkv.tools.evaluation.records import Record, Scored


def summarise(
    records: Sequence[Record],
    plan: Sequence[Policy],
    metrics: Sequence[str],
    entries: Mapping[tuple[int, int, int], Entry],
    judge: str | None = None,
) -> dict[str, Any]:
    """The numbers of each policy, and the answers of all policies to each question.

    Args:
        records: the questions.
        plan: the policies.
        metrics: names of `METRICS`.
        entries: all entries of the journal of a complete run.
        judge: a command that scores an answer (vlkv/tools/evaluation/judge.py).

    Raises:
        InputError: the judge fails.
    """
    asked = [(row, turn) for row, record in enumerate(records) for turn in range(len(record.turns))]
    full = next((i for i, policy in enumerate(plan) if policy == Full()), None)
    rows = []
    for i, policy in enumerate(plan):
        answers = [entries[row, turn, i] for row, turn in asked]
        scored = [
            Scored(
                entry["answer"], records[row].turns[turn].answers, entry["log_probability"], entry["reference"],
                records[row].turns[turn].question, records[row].dataset, records[row].images,
                () if full is None else tuple(entry["drawn"]) or (entries[row, turn, full]["answer"],),
            )
            for (row, turn), entry in zip(asked, answers, strict=True)
        ]  # fmt: skip
        # The first token after a prefill or a compression needs no step.
        steps = sum(max(0, entry["tokens"] - entry["begun"] - 1) for entry in answers)
        seconds = sum(entry["seconds"] for entry in answers)
        before = sum(entry["bytes_before"] for entry in answers) / len(answers)
        rows.append({
            "policy": text_of(policy),
            "keep": policy.keep,
            "scope": policy.scope,
            **score(metrics, scored, judge),
            "cache_bytes": sum(entry["bytes"] for entry in answers) / len(answers),
            "compressed_after": policy.facts.answer,
            "bytes_before": before or None,
            "tokens_per_second": steps / seconds if steps else math.nan,  # NaN: no answer has needed a step
        })  # fmt: skip
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
    names = [*metrics, *([] if judge is None else ["judge"])]
    return {"questions": len(asked), "metrics": names, "rows": rows, "answers": questions}


def table(result: Mapping[str, Any]) -> Table:
    """A table with one row per policy: metrics, bytes of the cache per question, decoding speed.

    If a policy compresses during the answer, a column shows the bytes of the full cache until then.
    """
    late = any(row["bytes_before"] for row in result["rows"])
    percent = [name for name in result["metrics"] if name in FRACTIONS]
    title = f"{result['questions']} questions" + (f"; {', '.join(percent)} in percent" if percent else "")
    output = Table(title=title)
    output.add_column("policy", overflow="fold")
    output.add_column("scope")
    for name in (*result["metrics"], "KiB", *(["KiB before"] if late else []), "tokens/s"):
        output.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        values = [f"{100 * row[name]:.1f}" if name in FRACTIONS else f"{row[name]:.4g}" for name in result["metrics"]]
        sizes = [row["cache_bytes"], *([row["bytes_before"]] if late else [])]
        values += ["" if size is None else f"{size / 1024:.1f}" for size in sizes]
        output.add_row(row["policy"], row["scope"], *values, f"{row['tokens_per_second']:.0f}")
    return output


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Plots every metric against bytes and against speed. Lines join one method's keeps. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)

    metrics, lines = result["metrics"], _lines(result["rows"])
    figure = Figure(figsize=(10.4, 3.6 * len(metrics)), layout="constrained")
    for name, (left, right) in zip(metrics, figure.subplots(len(metrics), 2, squeeze=False), strict=True):
        for number, (method, rows) in enumerate(lines.items()):
            mark = "os^vDP*X"[number // 10 % 8]  # matplotlib repeats its colours after ten
            for axes, x, unit in ((left, "cache_bytes", 1024), (right, "tokens_per_second", 1)):
                axes.plot([row[x] / unit for row in rows], [row[name] for row in rows], marker=mark, label=method)
        left.set_xlabel("allocated cache per row, KiB")
        right.set_xlabel("decoded tokens per second")
        left.set_ylabel(f"{name} (lower is better)" if name in LOWER_IS_BETTER else name)
        for axes in (left, right):
            axes.grid(alpha=0.3)
    figure.axes[1].legend(fontsize="small")
    with replacing(file) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each method and scope, sorted by bytes."""
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        method = re.sub(r"keep=[^,)]+(, )?", "", row["policy"]).replace("()", "")
        lines.setdefault(f"{method}, {row['scope']}", []).append(row)
    return {name: sorted(found, key=lambda row: row["cache_bytes"]) for name, found in lines.items()}
