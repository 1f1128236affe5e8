"""Picks the implementation of an op: None always works, a named one runs or says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def choose(op: str, implementations: Mapping[str, Callable[..., Any]], name: str | None, default: str) -> Any:
    """The implementation called `name`, or the default.

    Raises:
        ValueError: no such implementation; names those there are.
    """
    if name is None:
        return implementations[default]
    if name not in implementations:
        raise ValueError(f"{op}: no implementation {name!r} (available: {', '.join(implementations)})")
    return implementations[name]
