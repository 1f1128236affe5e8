"""Prints results as tables: ours, or ours beside a paper's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vlkv import policies
from vlkv.benching import papers
from vlkv.benching.settings import Setting, cache_bytes, label
from vlkv.benching.subjects import Subject
from vlkv.policies import Policy

Line = tuple[Subject, Setting, Policy]
_GIB = 2**30


def _name(policy: Policy) -> str:
    """The label with the scope, and with the options that differ from the method's defaults."""
    full = isinstance(policy, policies.Full)
    default = type(policy)() if full else type(policy)(keep=policy.keep or 1.0)
    differs = {
        name: value for name, value in policy.options().items()
        if name not in ("keep", "budget", "scope") and value != default.options().get(name)
    }  # fmt: skip
    details = ", ".join([*([] if full else [policy.scope]), *(f"{name}={value}" for name, value in differs.items())])
    return f"{label(policy)} ({details})" if details else label(policy)


def show(console: Console, table: Table) -> None:
    """Prints a table that fits a narrow terminal: values that are equal in all rows are in a line above it."""
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    same = {name: cells[0] for name, cells in columns.items() if len(cells) > 1 and len(set(cells)) == 1}
    common = [f"{name} {value}" for name, value in same.items() if value]
    made = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    shown = {name: cells for name, cells in columns.items() if name not in same}
    for name, cells in shown.items():
        made.add_column(name, overflow="fold", min_width=max((len(x) for x in cells if len(x) < 10), default=0))
    for row in zip(*shown.values(), strict=True):
        made.add_row(*row)
    for line in (table.title, ", ".join(common)):
        if line:
            console.print(line, highlight=False)
    console.print(made)


def plan(console: Console, lines: Sequence[Line], done: Iterable[bool]) -> None:
    """Prints the planned measurements and the bytes that they need."""
    table = Table("model", "batch", "prompt", "text", "new", "policy", "weights GiB", "cache GiB", "measured")
    for (subject, setting, policy), is_done in zip(lines, done, strict=True):
        size = cache_bytes(policy, subject.config, setting, subject.dtype.itemsize)
        table.add_row(
            f"{subject.name}, {subject.dtype.name}", *_sizes(setting), _name(policy), f"{subject.bytes / _GIB:.3f}",
            f"{size / _GIB:.4f}", "yes" if is_done else "",
        )  # fmt: skip
    show(console, table)


def measured(console: Console, rows: Sequence[tuple[Line, dict[str, Any]]]) -> None:
    """Prints times, speed and bytes, and ratios to the full cache of the same run."""
    table = Table(
        "batch", "prompt", "new", "policy", "prefill s", "ms/step", "token/s", "cache MiB", "peak GiB", "first s",
        "prefill", "decode", "peak", title="last three columns: relative to the full cache in the same run",
    )  # fmt: skip
    planned = False
    for (_, setting, policy), row in rows:
        batch, prompt, _, new = _sizes(setting)
        if "error" in row:
            table.add_row(batch, prompt, new, _name(policy), row["error"])
            continue
        ratio = row.get("to_full", {})
        planned |= row["peak"]["source"] == "compiled.memory_analysis"
        table.add_row(
            batch, prompt, new, _name(policy), f"{row['prefill_seconds']:.4g}", f"{1e3 * row['step_seconds']:.4g}",
            f"{row['tokens_per_second']:.4g}", f"{row['cache_bytes'] / 2**20:.2f}",
            f"{row['peak']['bytes'] / _GIB:.3f}", f"{row['first_call_seconds']:.1f}",
            *(f"{ratio[name]:.2f}" if ratio.get(name) else "" for name in ("prefill", "decode", "peak")),
        )  # fmt: skip
    show(console, table)
    if planned:
        console.print(
            "peak: memory planned by the compiler (compiled.memory_analysis), including weights, if the device does "
            "not report its peak, or its peak was reached by an earlier program", highlight=False,
        )  # fmt: skip


def beside(
    console: Console, name: str, lines: Sequence[tuple[papers.Point, Line, dict[str, Any]]], machine: dict[str, Any]
) -> None:
    """Prints each number of a paper with ours, and both relative to the full cache."""
    paper = papers.named(name)
    table = Table("model", "batch", "prompt", "new", "policy", "figure", "paper", "ours", "paper/full", "ours/full")
    full: dict[tuple[Any, ...], tuple[papers.Figures, dict[str, Any]]] = {}
    for point, (subject, setting, policy), row in lines:
        place = subject.name, point.setting
        if isinstance(policy, policies.Full):
            full[place] = point.figures, row
        printed_figures: dict[str, float | None] = {**point.figures} or {"total_seconds": None}
        for figure, printed in printed_figures.items():
            ours = None if "error" in row else papers.OURS[figure](row)
            shares = ["", ""]
            if place in full and not isinstance(policy, policies.Full):
                theirs, base = full[place]
                if printed is not None and theirs.get(figure):
                    shares[0] = f"{printed / theirs[figure]:.2f}"
                if ours is not None and "error" not in base:
                    shares[1] = f"{ours / papers.OURS[figure](base):.2f}"
            batch, prompt, _, new = _sizes(setting)
            table.add_row(
                subject.name, batch, prompt, new, _name(policy), figure.replace("_", " "),
                "" if printed is None else f"{printed:g}", row["error"] if ours is None else f"{ours:.4g}", *shares,
            )  # fmt: skip
    console.print(f"{paper.title}. Paper: {paper.hardware}. Ours: {_machine(machine)}", highlight=False)
    show(console, table)
    for note in paper.notes:
        console.print(f"- {note}", highlight=False)
    changed = {
        part for point, (subject, setting, _), _ in lines
        for part, differs in (("model", subject.name != point.model), ("prompt or tokens", setting != point.setting))
        if differs
    }  # fmt: skip
    if changed and not paper.computed:
        console.print(f"- not the paper's setting: different {' and '.join(sorted(changed))}", highlight=False)


def compiled(console: Console, rows: Sequence[tuple[Line, dict[str, Any]]]) -> None:
    """Prints the compile times of `generate`."""
    table = Table("model", "batch", "prompt", "new", "policy", "trace s", "compile s", title="generate, in one program")
    for (subject, setting, policy), row in rows:
        batch, prompt, _, new = _sizes(setting)
        table.add_row(
            subject.name, batch, prompt, new, _name(policy), f"{row['trace_seconds']:.2f}",
            f"{row['compile_seconds']:.2f}",
        )  # fmt: skip
    show(console, table)


def _sizes(setting: Setting) -> tuple[str, str, str, str]:
    return str(setting.batch), str(setting.prompt), str(setting.text), str(setting.new)


def _machine(machine: dict[str, Any]) -> str:
    where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    return f"{where}, {machine['cores']} cores, jax {machine['jax']}, {machine['commit']}"
