"""The measurements of `vlkv inspect`: each runs a model and returns arrays, table columns, and panels to draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vlkv.tools.commands.views import answers, remaining, scores
from vlkv.tools.commands.views.case import Case, View


class Measure(NamedTuple):
    """A measurement, the figures that it repeats, and the policy and keep that they use."""

    view: Callable[[Case], View]
    source: str
    policy: str
    keep: float | None


WHAT = {
    "budgets": Measure(scores.budgets, "PrefixKV, Fig. 4", "PrefixKV", 0.5),
    "lorenz": Measure(scores.lorenz, "PrefixKV, Figs. 2, 4", "PrefixKV", 0.5),
    "strength": Measure(scores.strength, "AirCache, Fig. 3", "AirCache", 0.1),
    "divergence": Measure(scores.divergence, "AirCache, Table 13; CSP, Figs. 1, 7", "AirCache", 0.1),
    "error": Measure(answers.error, "PrefixKV, Fig. 5", "PrefixKV", 0.5),
    "attention": Measure(answers.attention, "A-VL, Fig. 1", "Full", None),
    "concordance": Measure(answers.concordance, "A-VL, Figs. 4, 5", "Full", None),
    "observers": Measure(scores.observers, "AirCache, Fig. 1", "AirCache", 0.1),
    "patches": Measure(answers.patches, "A-VL, Fig. 3", "Full", None),
    "densities": Measure(scores.densities, "CSP, Fig. 6", "CSP", 0.2),
    "merged": Measure(remaining.merged, "LightKV, Fig. 7", "LightKV", None),
    "survival": Measure(remaining.survival, "LightKV, Fig. 7", "FastV", 0.5),
    "cost": Measure(remaining.cost, "LightKV, Tables 1, 6", "FastV", 0.5),
}

__all__ = ["WHAT", "Case", "Measure", "View"]
