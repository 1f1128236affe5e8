"""Quality as a function of the cache's bytes, to choose a method and a number of bits for a budget."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlkv.errors import InputError
from vlkv.files import replacing
from vlkv.tools.evaluation.metrics import FRACTIONS, SELF, check_metrics

Point = Mapping[str, Any]  # name, bits, bytes (a share), quality, low and high (its interval), code
QUALITIES = tuple(name for name in FRACTIONS if name != SELF)  # metrics that are a share of right answers
CONTROLS = ("Random", "ImgRandom", "Downsample")  # methods that choose without looking
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#9c755f", "#76b7b2", "#edc948", "#5b5b5b")
_ENDS = {"low": min, "high": max}
_LABELLED = len(_COLOURS)  # lines with a colour and a label


def check_quality(metric: str) -> None:
    """Raises InputError if the metric is not one of `QUALITIES`, or if its package is not installed."""
    if metric not in QUALITIES:
        raise InputError(f"metric {metric}: choose one that is a share of right answers: {', '.join(QUALITIES)}")
    check_metrics([metric], 1)


def pareto(points: Sequence[Point]) -> list[Point]:
    """The Pareto frontier, sorted by bytes: points that are better than all points with as many bytes or fewer."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point["bytes"], -point["quality"])):
        if not best or point["quality"] > best[-1]["quality"]:
            best.append(point)
    return best


def best_at(points: Sequence[Point], share: float) -> Point | None:
    """The point with the best quality among those with at most `share` of the bytes; None if there is none.

    Of points with equal quality, the smallest. A point may exceed `share` by one percent, because budgets are rounded.
    """
    fitting = [point for point in points if point["bytes"] <= 1.01 * share + 1e-4]
    return min(fitting, key=lambda point: (-point["quality"], point["bytes"]), default=None)


def plot(points: Sequence[Point], file: Path, *, title: str, label: str, full: float | None = None) -> None:
    """Draws one line per method and number of bits, with intervals, and the Pareto frontier, as PNG. Needs matplotlib.

    The best eight have a colour and a label, the others are grey; a band contains the controls. `label` is the name of
    the vertical axis, and `full` the quality of the full cache, drawn as a dashed line.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)

    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    axes = figure.subplots()
    best = pareto(points)
    steps = ([p[name] for p in best] for name in ("bytes", "quality"))
    wide: dict[str, Any] = {"color": "#d9d9d9", "linewidth": 9, "solid_capstyle": "butt", "zorder": 1}
    axes.step(*steps, where="post", label="frontier", **wide)
    if full is not None:
        axes.axhline(full, color="black", linestyle="--", linewidth=1, label="full cache, 16 bits")
    sizes = [p["bytes"] for p in points]
    width = max(math.log(max(sizes) / min(sizes)), 0.1)
    _draw_band(axes, [point for point in points if point["name"] in CONTROLS])
    _draw_lines(axes, points, width)
    axes.set_xscale("log")
    ticks: list[float] = []
    for x in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0):
        inside = min(sizes) * 0.9 <= x <= max(sizes) * 1.1
        if inside and (not ticks or math.log(x / ticks[-1]) > 0.08 * width):  # otherwise two labels would collide
            ticks.append(x)
    axes.set_xticks(ticks, [f"{100 * x:g} %" for x in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda x, _: f"{100 * x:g} %")
    axes.set_ylim(-0.02, 1.02)
    entries = "vision entries" if all(p["scope"] == "vision" for p in points) else "entries in scope"
    axes.set(xlabel=f"bytes of the {entries}, share of the full cache in 16 bits", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    with replacing(file) as partial:
        figure.savefig(partial, format="png", dpi=130)


def _draw_lines(axes: Any, points: Sequence[Point], width: float) -> None:
    """The lines of all methods but the controls; grey ones are below the others."""
    styles = {16: ("-", "o"), 8: ("-.", "D"), 4: ("--", "s"), 2: (":", "^")}
    lines: dict[tuple[str, int], list[Point]] = {}
    for point in sorted(points, key=lambda point: point["bytes"]):
        if point["name"] not in CONTROLS:
            lines.setdefault((point["name"], point["bits"]), []).append(point)
    best = sorted(lines, key=lambda key: -_worth(lines[key], points))[:_LABELLED]
    names = list(dict.fromkeys(name for name, _ in best))
    aside = _side_by_side({key: [p["bytes"] for p in lines[key]] for key in best}, width)
    for key in [*(key for key in lines if key not in best), *best]:
        (name, bits), quality = key, np.array([p["quality"] for p in lines[key]])
        line, mark = styles[bits]
        if key not in best:
            sizes = [p["bytes"] for p in lines[key]]
            axes.plot(sizes, quality, line, color="#c8c8c8", linewidth=1, marker=mark, markersize=2, zorder=1.5)
            continue
        bars = errors(quality, [(p["low"], p["high"]) for p in lines[key]])
        label = name if bits == 16 else f"{name}, {bits} bits"
        style = {"linestyle": line, "marker": mark, "color": _COLOURS[names.index(name)], "label": label}
        axes.errorbar(aside[key], quality, yerr=bars, markersize=5, capsize=2, elinewidth=0.8, alpha=0.9, **style)
    if len(lines) > len(best):
        axes.plot([], [], color="#c8c8c8", marker="o", markersize=2, label=f"{len(lines) - len(best)} other methods")


def errors(values: np.ndarray, intervals: Sequence[tuple[float, float]]) -> np.ndarray:
    """The lengths of error bars below and above values."""
    low, high = np.array(intervals).T
    with np.errstate(invalid="ignore"):  # a perplexity may be infinite
        return np.clip(np.stack([values - low, high - values]), 0, None)


def _side_by_side(lines: Mapping[Any, Sequence[float]], width: float) -> dict[Any, list[float]]:
    """Numbers of bytes, moved a little on a logarithmic axis of this width: intervals do not hide each other."""
    sizes: list[float] = []  # numbers of bytes that differ by more than rounding
    for x in sorted(itertools.chain(*lines.values())):
        if not sizes or x > 1.1 * sizes[-1]:
            sizes.append(x)
    numbers = {key: [int(np.searchsorted(sizes, x, "right")) - 1 for x in values] for key, values in lines.items()}
    beside = [[key for key in lines if i in numbers[key]] for i in range(len(sizes))]
    gap = np.diff(np.log(sizes)).min(initial=width)
    step = min(0.012 * width, gap / (1 + max(map(len, beside), default=1)))

    def aside(key: Any, i: int) -> float:
        return sizes[i] * math.exp(step * (beside[i].index(key) - (len(beside[i]) - 1) / 2))

    return {key: [aside(key, i) for i in numbers[key]] for key in lines}


def _worth(line: Sequence[Point], points: Sequence[Point]) -> float:
    """The quality of a line relative to the best of all points with as many bytes, mean over its points."""
    shares = []
    for point in line:
        best = best_at(points, point["bytes"])
        shares.append(1.0 if best is None or best["quality"] <= 0 else point["quality"] / best["quality"])
    return sum(shares) / len(shares)


def _draw_band(axes: Any, points: Sequence[Point]) -> None:
    """A band from the worst to the best control at each number of bytes."""
    sizes = sorted({point["bytes"] for point in points})
    low, high = ([find(p[end] for p in points if p["bytes"] == x) for x in sizes] for end, find in _ENDS.items())
    if sizes:
        label = "controls: " + ", ".join(dict.fromkeys(p["name"] for p in points))
        axes.fill_between(sizes, low, high, color="#e15759", alpha=0.15, linewidth=0, label=label)
