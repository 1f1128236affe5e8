"""The mean of what `vlkv inspect` measured on several samples.

Where samples differ in length (steps of an answer, tokens of a prompt), each element is the mean over the samples that
are long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vlkv.tools.commands.plots import Curves, Maps, Panel
from vlkv.tools.commands.views import View


def mean_view(views: Sequence[View]) -> View:
    """The mean of all numbers, and for curves their standard deviation over the samples."""
    if len(views) == 1:
        return views[0]
    panels = [_panel(alike) for alike in zip(*(view.panels for view in views), strict=False)]
    return View(_mean([v.arrays for v in views]), _mean([v.columns for v in views]), panels)


def _panel(panels: Sequence[Panel]) -> Panel:
    maps = [panel for panel in panels if isinstance(panel, Maps)]
    if maps:
        return maps[0]._replace(pictures=_mean([panel.pictures for panel in maps]))
    curves = [panel for panel in panels if isinstance(panel, Curves)]
    lines = [panel.lines for panel in curves]
    spread = {name: np.nanstd(_stack([line[name] for line in lines]), axis=0) for name in lines[0]}
    return curves[0]._replace(x=_mean([panel.x for panel in curves]), lines=_mean(lines), spread=spread)


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {name: _mean([value[name] for value in values]) for name in first if all(name in v for v in values)}
    if isinstance(first, (list, tuple)):
        return [_mean(alike) for alike in zip(*values, strict=False)]
    if first is None or np.asarray(first).dtype.kind in "USO":  # names, not numbers
        return first
    stack = _stack(values)
    counts = np.isfinite(stack).sum(axis=0)
    mean = np.where(counts > 0, np.nansum(stack, axis=0) / np.maximum(counts, 1), np.nan)
    whole = np.asarray(first).dtype.kind in "biu" and (stack == stack[:1]).all()
    return np.asarray(first) if whole else mean


def _stack(values: Sequence[Any]) -> np.ndarray:
    """Arrays along a new first axis, as float64, padded with NaN to the largest; infinite values become NaN."""
    arrays = [np.asarray(value, float) for value in values]
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    stack = np.full((len(arrays), *shape), np.nan)
    for i, array in enumerate(arrays):
        place: Any = (i, *map(slice, array.shape))
        stack[place] = np.where(np.isfinite(array), array, np.nan)
    return stack
