"""Quality as a function of the cache's bytes, to choose a method and a number of bits for a budget."""

from __future__ import annotations

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
    """Draws one line per method and number of bits, with intervals, and the Pareto frontier. Needs matplotlib.

    The best eight have a colour and a label, the others are grey; a band contains the controls.

    Args:
        points: the measurements.
        file: the PNG file to write.
        title: text above the plot.
        label: name of the vertical axis.
        full: quality of the full cache, drawn as a dashed line.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    axes = figure.subplots()
    frontier = pareto(points)
    axes.step([p["bytes"] for p in frontier], [p["quality"] for p in frontier], where="post", color="#d9d9d9",
              linewidth=9, solid_capstyle="butt", label="frontier", zorder=1)  # fmt: skip
    if full is not None:
        axes.axhline(full, color="black", linestyle="--", linewidth=1, label="full cache, 16 bits")
    _draw_band(axes, [point for point in points if point["name"] in CONTROLS])
    styles = {16: ("-", "o"), 8: ("-.", "D"), 4: ("--", "s"), 2: (":", "^")}
    every = _series([point for point in points if point["name"] not in CONTROLS])
    best = sorted(every, key=lambda key: -_worth(every[key], points))[:_LABELLED]
    names = list(dict.fromkeys(name for name, _ in best))
    width = max(math.log(max(p["bytes"] for p in points) / min(p["bytes"] for p in points)), 0.1)
    aside = _side_by_side({key: [p["bytes"] for p in every[key]] for key in best}, width)
    for key in [*(key for key in every if key not in best), *best]:
        (name, bits), series = key, every[key]
        line, mark = styles[bits]
        quality = [p["quality"] for p in series]
        if key not in best:
            axes.plot([p["bytes"] for p in series], quality, line, color="#c8c8c8", linewidth=1, marker=mark,
                      markersize=2, zorder=1.5)  # fmt: skip
            continue
        errors = [[max(0, q - p["low"]) for q, p in zip(quality, series, strict=True)],
                  [max(0, p["high"] - q) for q, p in zip(quality, series, strict=True)]]  # fmt: skip
        axes.errorbar(
            aside[key], quality, yerr=errors, linestyle=line, marker=mark, markersize=5, capsize=2,
            elinewidth=0.8, color=_COLOURS[names.index(name)], alpha=0.9,
            label=name if bits == 16 else f"{name}, {bits} bits",
        )  # fmt: skip
    if len(every) > len(best):
        axes.plot([], [], color="#c8c8c8", marker="o", markersize=2, label=f"{len(every) - len(best)} other methods")
    axes.set_xscale("log")
    percent = FuncFormatter(lambda x, _: f"{100 * x:g} %")
    ticks: list[float] = []
    for x in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0):
        inside = min(p["bytes"] for p in points) * 0.9 <= x <= max(p["bytes"] for p in points) * 1.1
        if inside and (not ticks or math.log(x / ticks[-1]) > 0.08 * width):  # otherwise two labels would collide
            ticks.append(x)
    axes.set_xticks(ticks, [f"{100 * x:g} %" for x in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(percent)
    axes.set_ylim(-0.02, 1.02)
    entries = "vision entries" if all(p["scope"] == "vision" for p in points) else "entries in scope"
    axes.set_xlabel(f"bytes of the {entries}, share of the full cache in 16 bits")
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5))
    with replacing(file) as partial:
        figure.savefig(partial, format="png", dpi=130)


def _side_by_side(lines: Mapping[Any, Sequence[float]], width: float) -> dict[Any, list[float]]:
    """Numbers of bytes, moved a little on a logarithmic axis of this width: intervals do not hide each other."""
    places: list[float] = []  # numbers of bytes that differ by more than rounding
    for x in sorted(itertools.chain(*lines.values())):
        if not places or x > 1.1 * places[-1]:
            places.append(x)
    of = {key: [int(np.searchsorted(places, x, "right")) - 1 for x in values] for key, values in lines.items()}
    here = {place: [key for key in lines if place in of[key]] for place in range(len(places))}
    gap = np.diff(np.log(places)).min(initial=width)
    step = min(0.012 * width, gap / (1 + max(map(len, here.values()), default=1)))

    def aside(key: Any, place: int) -> float:
        return places[place] * math.exp(step * (here[place].index(key) - (len(here[place]) - 1) / 2))

    return {key: [aside(key, place) for place in of[key]] for key in lines}


def _series(points: Sequence[Point]) -> dict[tuple[str, int], list[Point]]:
    """The points of each method and number of bits, by bytes."""
    found: dict[tuple[str, int], list[Point]] = {}
    for point in sorted(points, key=lambda point: point["bytes"]):
        found.setdefault((point["name"], point["bits"]), []).append(point)
    return found


def _worth(series: Sequence[Point], points: Sequence[Point]) -> float:
    """How close a line comes to the best of all with as many bytes: the mean share of the best quality."""
    shares = []
    for point in series:
        best = best_at(points, point["bytes"])
        shares.append(1.0 if best is None or best["quality"] <= 0 else point["quality"] / best["quality"])
    return sum(shares) / len(shares)


def _draw_band(axes: Any, points: Sequence[Point]) -> None:
    """A band from the worst to the best control at each number of bytes; a thin one if there is only one."""
    places = sorted({point["bytes"] for point in points})
    found = [[p for p in points if p["bytes"] == x] for x in places]
    if places:
        axes.fill_between(places, [min(p["low"] for p in same) for same in found],
                          [max(p["high"] for p in same) for same in found], color="#e15759", alpha=0.15, linewidth=0,
                          label="controls: " + ", ".join(dict.fromkeys(p["name"] for p in points)))  # fmt: skip
