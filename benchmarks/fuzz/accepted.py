"""Differences from transformers that are meant, with their reasons: (part of "family: case", reason)."""

from __future__ import annotations

ACCEPTED: tuple[tuple[str, str], ...] = ()


def reason(case: str) -> str | None:
    """Why the case may differ; None: it may not."""
    return next((why for part, why in ACCEPTED if part in case), None)
