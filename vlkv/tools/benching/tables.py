"""Prints results as tables."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vlkv.tools.benching.results import Line
from vlkv.tools.benching.settings import Setting, cache_bytes, label

_GIB = 2**30
_PLANNED = (
    "peak: memory planned by the compiler (compiled.memory_analysis), including weights, if the device does not report "
    "its peak, or its peak was reached by an earlier program"
)


def show(console: Console, table: Table) -> None:
    """Prints a table that fits a narrow terminal: values that are equal in all rows are in a line above it."""
    columns = {str(column.header): list(map(str, column.cells)) for column in table.columns}
    same = {name: cells[0] for name, cells in columns.items() if len(cells) > 1 and len(set(cells)) == 1}
    common = [f"{name} {value}" for name, value in same.items() if value]
    printed = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    shown = {name: cells for name, cells in columns.items() if name not in same}
    for name, cells in shown.items():
        printed.add_column(name, overflow="fold", min_width=max((len(x) for x in cells if len(x) < 10), default=0))
    for row in zip(*shown.values(), strict=True):
        printed.add_row(*row)
    for line in (table.title, ", ".join(common)):
        if line:
            console.print(line, highlight=False)
    console.print(printed)


def plan(console: Console, lines: Sequence[Line], done: Iterable[bool]) -> None:
    """Prints the planned measurements and the bytes that they need."""
    table = Table("model", "batch", "prompt", "text", "new", "policy", "weights GiB", "cache GiB", "measured")
    for (subject, setting, policy), is_done in zip(lines, done, strict=True):
        size = cache_bytes(policy, subject.config, setting, subject.dtype.itemsize)
        gib = f"{subject.bytes / _GIB:.3f}", f"{size / _GIB:.4f}"
        model = f"{subject.name}, {subject.dtype.name}"
        table.add_row(model, *sizes(setting), label(policy), *gib, "yes" if is_done else "")
    show(console, table)


def measured(console: Console, rows: Sequence[tuple[Line, dict[str, Any]]]) -> None:
    """Prints times, speed and bytes, and ratios to the full cache, and to the first setting, of the same run."""
    settings = "batch", "prompt", "new", "policy"
    numbers = "prefill s", "ms/step", "token/s", "cache MiB", "peak GiB", "first s"
    title = "last three columns: relative to the full cache in the same run"
    first = next((row["to_first"] for _, row in rows if "to_first" in row), None)
    if first is not None:
        title += f"; step: relative to batch {first['batch']}, prompt {first['prompt']}"
    step = [] if first is None else ["step"]
    table = Table(*settings, *numbers, *step, "prefill", "decode", "peak", title=title)
    planned = False
    for (_, setting, policy), row in rows:
        batch, prompt, _, new = sizes(setting)
        if "error" in row:
            table.add_row(batch, prompt, new, label(policy), row["error"])
            continue
        planned |= row["peak"]["source"] == "compiled.memory_analysis"
        ratio = {"step": row.get("to_first", {}).get("decode"), **row.get("to_full", {})}
        table.add_row(
            *(batch, prompt, new, label(policy)),
            f"{row['prefill_seconds']:.4g}",
            f"{1e3 * row['step_seconds']:.4g}",
            f"{row['tokens_per_second']:.4g}",
            f"{row['cache_bytes'] / 2**20:.2f}",
            f"{row['peak']['bytes'] / _GIB:.3f}",
            f"{row['first_call_seconds']:.1f}",
            *(f"{ratio[name]:.2f}" if ratio.get(name) else "" for name in (*step, "prefill", "decode", "peak")),
        )
    show(console, table)
    if planned:
        console.print(_PLANNED, highlight=False)


def compiled(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Prints the times of tracing and compiling programs, and their sums."""
    table = Table("program", "trace, s", "compile, s", "processor time, s")
    for row in rows:
        table.add_row(*map(str, row.values()))
    table.add_row("all", *(f"{sum(row[name] for row in rows):.1f}" for name in list(rows[0])[1:]))
    console.print(table)


def sizes(setting: Setting) -> tuple[str, str, str, str]:
    """Batch, prompt, text and new tokens as text."""
    return str(setting.batch), str(setting.prompt), str(setting.text), str(setting.new)
