"""Draws panels with matplotlib (optional extra `plot`), which is imported only when needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlkv.errors import InputError
from vlkv.files import replacing

_IN_LEGEND = 12  # a panel with more lines has no legend entry for each


class Curves(NamedTuple):
    """Lines with a common x axis."""

    title: str
    x_label: str
    y_label: str
    x: np.ndarray
    lines: dict[str, np.ndarray]


class Maps(NamedTuple):
    """Maps of patches with values between 0 and 1; NaN: no token."""

    title: str
    pictures: dict[str, np.ndarray]


Panel = Curves | Maps


def check_plots(out: Path) -> None:
    """Raises InputError if the picture cannot be drawn or written. Called before anything is computed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("plots need matplotlib: pip install matplotlib, or ask for --json")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder to write the picture into")
    if out.suffix.lower() != ".png":
        raise InputError(f"{out}: the picture is a PNG; give a name that ends in .png")
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give the name of a file")


def save(panels: list[Panel], out: Path) -> None:
    """Draws the panels side by side and writes the file atomically."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)

    figure = Figure(figsize=(5.2 * len(panels), 4.0), layout="constrained")
    for part, panel in zip(figure.subfigures(1, len(panels), squeeze=False)[0], panels, strict=True):
        part.suptitle(panel.title, fontsize="medium")
        if isinstance(panel, Curves):
            _curves(part, panel)
        else:
            _maps(part, panel)
    with replacing(out) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _curves(part: Any, panel: Curves) -> None:
    from matplotlib import colormaps  # noqa: PLC0415

    axes = part.subplots()
    shades = np.linspace(0, 0.9, len(panel.lines))
    for shade, (name, y) in zip(shades, panel.lines.items(), strict=True):
        axes.plot(panel.x, y, label=name, color=colormaps["viridis"](shade), marker="." if len(panel.x) < 40 else "")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    if 1 < len(panel.lines) <= _IN_LEGEND:
        axes.legend(fontsize="small")


def _maps(part: Any, panel: Maps) -> None:
    columns = min(4, len(panel.pictures))
    grid = part.subplots(-(-len(panel.pictures) // columns), columns, squeeze=False).ravel()
    for axes in grid:
        axes.axis("off")
    for axes, (name, picture) in zip(grid, panel.pictures.items(), strict=False):
        axes.imshow(picture, vmin=0, vmax=1, cmap="viridis")
        axes.set_title(name, fontsize="small")
