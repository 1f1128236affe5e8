"""Draws panels with matplotlib (optional extra `plot`), which is imported only when needed."""

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from vlkv.analysis.text_drawing import KeptText
from vlkv.errors import InputError
from vlkv.files import replacing

_IN_LEGEND = 12  # if a panel has more lines, its legend names only the first and the last
_PANELS = 4  # at most, in one row
MEAN = "mean"  # a line of this name is dashed
_LOG = 2.0  # an axis is logarithmic if its values span more powers of ten than this


# A legend above the axes hides no line.
_ABOVE: dict[str, Any] = {"fontsize": "small", "loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "frameon": False}


class Curves(NamedTuple):
    """Lines with a common x axis."""

    title: str
    x_label: str
    y_label: str
    x: np.ndarray
    lines: dict[str, np.ndarray]
    spread: Mapping[str, np.ndarray] = MappingProxyType({})  # standard deviation over the samples, drawn as a band
    log: bool = True  # whether the axis may be logarithmic


class Maps(NamedTuple):
    """Values per patch between 0 and 1 (NaN where there is no token), or pictures [h, w, 3] of bytes."""

    title: str
    pictures: dict[str, np.ndarray]


Panel = Curves | Maps


def by_layer(title: str, y_label: str, lines: dict[str, np.ndarray], *, log: bool = True) -> Curves:
    """Lines with one value for each layer."""
    return Curves(title, "layer", y_label, np.arange(len(next(iter(lines.values())))), lines, log=log)


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raises InputError if matplotlib is missing."""
    if not has_matplotlib():
        raise InputError("plots need matplotlib: pip install matplotlib, or ask for --json")


def check_file(out: Path, name: str, form: str | None = None) -> None:
    """Raises InputError if a file cannot be written, or if its name does not end with the form."""
    if not out.parent.is_dir():
        raise InputError(f"{out.parent}: no such folder to write the {name} into")
    if form is not None and out.suffix.lower() != f".{form}":
        raise InputError(f"{out}: the {name} is written as {form.upper()}; give a name that ends in .{form}")
    if out.is_dir():
        raise InputError(f"{out}: is a folder; give the name of a file")


def save(panels: list[Panel] | KeptText, out: Path, title: str) -> None:
    """Draws the panels side by side under a title, or a text; the file appears when it is complete."""
    if isinstance(panels, KeptText):
        panels.save(out)
        return
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional, and slow to import)

    lines = -(-len(panels) // _PANELS)
    columns = -(-len(panels) // lines)
    figure = Figure(figsize=(5.2 * columns, 4.2 * lines + 0.4), layout="constrained")
    figure.suptitle(title, fontsize="large")
    parts = figure.subfigures(lines, columns, squeeze=False).ravel()
    for part, panel in zip(parts, panels, strict=False):
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
        colour = colormaps["viridis"](shade)
        if name == MEAN:
            axes.plot(panel.x, y, "--", label=f"{name} {np.mean(y):.3g}", color="black", linewidth=1)
            continue
        hidden = shade == 0 and len(panel.lines) == 2 and MEAN not in panel.lines
        width = 4 if hidden else 1.5  # shows below a second line that hides it
        axes.plot(panel.x, y, label=name, color=colour, linewidth=width, marker="." if len(panel.x) < 40 else "")
        if name in panel.spread and len(panel.lines) <= _IN_LEGEND:
            half = panel.spread[name]
            axes.fill_between(panel.x, y - half, y + half, color=colour, alpha=0.15, linewidth=0)
    lowest, highest = axes.dataLim.intervaly
    if panel.log and _decades(panel.lines) > _LOG:
        axes.set_yscale("log")
    elif 0 <= lowest < highest / 2:
        axes.set_ylim(bottom=0)
    if np.asarray(panel.x).dtype.kind in "iu":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    if len(panel.lines) > 1:
        handles = axes.lines if len(panel.lines) <= _IN_LEGEND else [axes.lines[0], axes.lines[-1]]
        axes.legend(handles=handles, **_ABOVE, ncols=min(4, len(handles)))


def _decades(lines: dict[str, np.ndarray]) -> float:
    """Powers of ten that the values span; 0 if some are not positive."""
    values = np.concatenate([np.ravel(y) for y in lines.values()]).astype(float)
    values = values[np.isfinite(values)]
    return float(np.log10(values.max() / values.min())) if len(values) and values.min() > 0 else 0.0


def _maps(part: Any, panel: Maps) -> None:
    lists = all(_is_list(picture) for picture in panel.pictures.values())
    columns = 2 if lists else math.ceil(math.sqrt(len(panel.pictures)))
    grid = part.subplots(-(-len(panel.pictures) // columns), columns, squeeze=False).ravel()
    for axes in grid[len(panel.pictures) :]:
        axes.axis("off")
    for axes, (name, picture) in zip(grid, panel.pictures.items(), strict=False):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#aaaeb6")
        aspect = "auto" if _is_list(picture) else None
        smooth = "nearest" if picture.ndim == 2 else "antialiased"
        axes.imshow(picture, vmin=0, vmax=1, cmap="viridis", aspect=aspect, interpolation=smooth)
        axes.set_title(name, fontsize="small")


def _is_list(picture: np.ndarray) -> bool:
    """Whether the array is a matrix of rows of tokens, not a picture."""
    return picture.ndim == 2 and picture.shape[0] * 2 < picture.shape[1]
