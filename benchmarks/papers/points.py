"""The lines of a published table of times, operations or memory."""

from __future__ import annotations

import dataclasses

from vlkv.policies import Policy
from vlkv.tools.benching.settings import Setting

Figures = dict[str, float]
TOWER = "decoder only: the vision tower, which costs the same with every policy, is not run"


@dataclasses.dataclass(frozen=True)
class Point:
    """One line of a table: what was measured, and what was printed."""

    model: str  # a name of vlkv.presets
    setting: Setting
    policy: Policy
    figures: Figures
    computed: Figures = dataclasses.field(default_factory=dict)  # ours, of figures that need no measurement


@dataclasses.dataclass(frozen=True)
class SpeedTable:
    """One published table."""

    title: str
    hardware: str
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()
    computed: bool = False  # from the config, not timed
    rounds: int = 5  # runs of which the time is the mean or median
