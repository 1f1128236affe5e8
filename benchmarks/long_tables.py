"""Writes the tables of long answers into docs/forever.md, from the results of `benchmarks.long_answers`.

python -m benchmarks.long_tables
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.documents import interval, line, marked, rule, write
from benchmarks.long_answers import CONTROLS, MODELS, stored
from vlkv.tools.evaluation import statistics

PAGE, MARKED = Path(__file__).parents[1] / "docs" / "forever.md", marked("forever")
Cells = dict[tuple[int, str], dict[int, list[float]]]  # scores of each round, by share and method


def tables() -> dict[str, str]:
    """For each task a table of all methods and shares, and which methods are above the controls."""
    by_task: dict[str, Cells] = {}
    for results in map(stored, MODELS):
        results.close()
        for row in results.rows:
            cells = by_task.setdefault(row["task"], {}).setdefault((row["share"], row["name"]), {})
            cells[row["round"]] = row["scores"]
    only = {task: by_task.pop(task)[100, "Full"] for task in list(by_task) if len(by_task[task]) == 1}
    lines = [line("task", "full cache"), rule(2), *(line(task, percent(rounds)) for task, rounds in only.items())]
    return {task: table(cells) for task, cells in by_task.items()} | {"only": "\n".join(lines)}


def table(cells: Cells) -> str:
    """A table of means with 95 % intervals, and which methods are above the controls on the same questions."""
    names, shares = dict.fromkeys(name for _, name in cells), sorted({share for share, _ in cells} - {100})
    lines = [line("method", *(f"{share} %" for share in shares)), rule(1 + len(shares))]
    for name in names:
        lines.append(line(name, *(percent(cells.get((100 if name == "Full" else x, name), {})) for x in shares)))
    lines.append("")
    for share in shares:
        above = {control: [name for name in names if is_above(cells, share, name, control)] for control in CONTROLS}
        each = "; ".join(f"above {control}: {', '.join(better) or 'none'}" for control, better in above.items())
        lines.append(f"- {share} %: {each}.")
    return "\n".join(lines)


def percent(rounds: Mapping[int, Sequence[float]]) -> str:
    """The mean of all questions with its interval; empty without any."""
    found = np.concatenate([*rounds.values(), []])
    return interval(float(found.mean()), *bounds(found), digits=0) if len(found) else ""


def bounds(values: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of a mean by the bootstrap over questions."""
    return statistics.interval(statistics.Metric(lambda _: []), values[None]) or (np.nan, np.nan)


def is_above(cells: Cells, share: int, name: str, control: str) -> bool:
    """Whether the interval of the difference from a control, on the questions that both have answered, is above 0."""
    ours, theirs = cells.get((share, name), {}), cells.get((share, control), {})
    both = [np.subtract(ours[i], theirs[i]) for i in ours if i in theirs]
    return bool(both) and bounds(np.concatenate(both))[0] > 0


if __name__ == "__main__":
    write([PAGE], "forever", tables().__getitem__)
