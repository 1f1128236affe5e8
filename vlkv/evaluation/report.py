"""The results of a run: numbers per policy, as a dictionary, a table and a plot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from vlkv.evaluation.journal import Entry
from vlkv.evaluation.metrics import FRACTIONS, LOWER_IS_BETTER, score
from vlkv.evaluation.records import Record, Scored
from vlkv.files import write_json
from vlkv.policies.compose import Composed
from vlkv.policies.full import Full
from vlkv.policies.policy import Policy


def code(policy: Policy) -> str:
    """The Python expression that makes a policy, with the names of `vlkv.policies`."""
    if not isinstance(policy, Composed):
        fields = dataclasses.fields(policy)  # type: ignore[arg-type]
        options = [f"{f.name}={getattr(policy, f.name)!r}" for f in fields if getattr(policy, f.name) != f.default]
        return f"{type(policy).__name__}({', '.join(options)})"
    stages = {"allocate": policy.allocated, "merge": policy.merged, "step": policy.stepped, "reduce": policy.reduced,
              "store": policy.stored}  # fmt: skip
    parts = [code(policy.scored), *(f"{name}={code(part)}" for name, part in stages.items() if part is not None)]
    if policy.smoothed is not None:
        parts.append(f"smooth={policy.smoothed!r}")
    return f"compose({', '.join(parts)})"


def label(policy: Policy) -> str:
    """A policy's name and the options that are not its defaults."""
    fields = dataclasses.fields(policy)  # type: ignore[arg-type]
    options = [f"{f.name}={getattr(policy, f.name)!r}" for f in fields if getattr(policy, f.name) != f.default]
    return f"{type(policy).__name__}({', '.join(options)})" if options else type(policy).__name__


def summarise(
    records: Sequence[Record],
    plan: Sequence[Policy],
    metrics: Sequence[str],
    entries: Mapping[tuple[int, int, int], Entry],
    judge: str | None = None,
) -> dict[str, Any]:
    """One row per policy, and every question with what each of them answered.

    Args:
        records: the questions.
        plan: the policies.
        metrics: names of `METRICS`.
        entries: of the journal, complete.
        judge: a command that scores an answer (vlkv/evaluation/judge.py).
    """
    asked = [(row, turn) for row, record in enumerate(records) for turn in range(len(record.turns))]
    full = next((i for i, policy in enumerate(plan) if type(policy) is Full), None)
    rows = []
    for i, policy in enumerate(plan):
        own = [entries[row, turn, i] for row, turn in asked]
        scored = [
            Scored(
                entry["answer"], records[row].turns[turn].answers, entry["log_probability"], entry["reference"],
                records[row].turns[turn].question, records[row].dataset, records[row].images,
                () if full is None else tuple(entry["drawn"]) or (entries[row, turn, full]["answer"],),
            )
            for (row, turn), entry in zip(asked, own, strict=True)
        ]  # fmt: skip
        seconds = sum(entry["seconds"] for entry in own)
        rows.append({
            "policy": label(policy),
            "keep": policy.keep,
            "scope": policy.scope,
            **score(metrics, scored, judge),
            "cache_bytes": sum(entry["bytes"] for entry in own) / len(own),
            "tokens_per_second": sum(entry["tokens"] for entry in own) / seconds,
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
    """One row per policy: metrics, bytes of a row's cache, decoding speed."""
    percent = [name for name in result["metrics"] if name in FRACTIONS]
    title = f"{result['questions']} questions" + (f"; {', '.join(percent)} in percent" if percent else "")
    made = Table(title=title)
    made.add_column("policy", overflow="fold")
    made.add_column("scope")
    for name in (*result["metrics"], "KiB", "tokens/s"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        values = [f"{100 * row[name]:.1f}" if name in FRACTIONS else f"{row[name]:.4g}" for name in result["metrics"]]
        made.add_row(
            row["policy"], row["scope"], *values, f"{row['cache_bytes'] / 1024:.1f}", f"{row['tokens_per_second']:.0f}"
        )
    return made


def save(result: Mapping[str, Any], file: Path) -> None:
    """Writes the result as JSON; the file appears or changes when it is complete."""
    write_json(file, _finite(result))


def plot(result: Mapping[str, Any], file: Path) -> None:
    """Every metric against bytes and against speed; a method's points at several keeps are joined. Needs matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)

    metrics, lines = result["metrics"], _lines(result["rows"])
    figure = Figure(figsize=(10.4, 3.6 * len(metrics)), layout="constrained")
    for name, (left, right) in zip(metrics, figure.subplots(len(metrics), 2, squeeze=False), strict=True):
        for number, (method, rows) in enumerate(lines.items()):
            mark = "os^vDP*X"[number // 10 % 8]  # colours come round after ten
            for axes, x, unit in ((left, "cache_bytes", 1024), (right, "tokens_per_second", 1)):
                axes.plot([row[x] / unit for row in rows], [row[name] for row in rows], marker=mark, label=method)
        left.set_xlabel("cache of a row, KiB as allocated")
        right.set_xlabel("tokens per second, decoding")
        left.set_ylabel(f"{name} (lower is better)" if name in LOWER_IS_BETTER else name)
        for axes in (left, right):
            axes.grid(alpha=0.3)
    figure.axes[1].legend(fontsize="small")
    new = file.with_name(f".{file.name}.new")
    figure.savefig(new, format="png", dpi=120)
    new.replace(file)


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(f"{row['policy'].partition('(')[0]}, {row['scope']}", []).append(row)
    return {name: sorted(found, key=lambda row: row["cache_bytes"]) for name, found in lines.items()}


def _finite(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
