"""The measurements of `vlkv inspect`: each runs a model and returns arrays, table columns, and panels to draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vlkv.tools.commands.views import answers, remaining, scores
from vlkv.tools.commands.views.case import Case, View


class Measurement(NamedTuple):
    """A measurement, the figures that it repeats (or ""), and the policy and keep that they use."""

    view: Callable[[Case], View]
    source: str
    policy: str
    keep: float | None


WHAT = {
    "budgets": Measurement(scores.budgets, "PrefixKV, Fig. 4", "PrefixKV", 0.5),
    "lorenz": Measurement(scores.lorenz, "PrefixKV, Figs. 2, 4", "PrefixKV", 0.5),
    "strength": Measurement(scores.strength, "AirCache, Fig. 3", "AirCache", 0.1),
    "divergence": Measurement(scores.divergence, "AirCache, Table 13; CSP, Figs. 1, 7", "AirCache", 0.1),
    "error": Measurement(answers.error, "PrefixKV, Fig. 5", "PrefixKV", 0.5),
    "attention": Measurement(answers.attention, "A-VL, Fig. 1", "Full", None),
    "concordance": Measurement(answers.concordance, "A-VL, Figs. 4, 5", "Full", None),
    "observers": Measurement(scores.observers, "AirCache, Fig. 1", "AirCache", 0.1),
    "patches": Measurement(answers.patches, "A-VL, Fig. 3", "Full", None),
    "densities": Measurement(scores.densities, "CSP, Fig. 6", "CSP", 0.2),
    "merged": Measurement(remaining.merged, "LightKV, Fig. 7", "LightKV", None),
    "survival": Measurement(remaining.survival, "LightKV, Fig. 7", "FastV", 0.5),
    "text": Measurement(remaining.text, "", "SnapKV", 0.2),
    "cost": Measurement(remaining.cost, "LightKV, Fig. 1, Tables 1, 6", "FastV", 0.5),
}

__all__ = ["WHAT", "Case", "Measurement", "View"]
