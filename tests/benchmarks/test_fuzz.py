"""The committed report of the fuzzer; `test_every_processor.py` runs a part of its images."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_the_committed_report(root):
    """All families were run, each difference has its reason from the table, and the counts add up."""
    from benchmarks.fuzz.accepted import ACCEPTED, reason

    report = json.loads((root / "benchmarks" / "results" / "fuzz.json").read_text())
    assert report["differs"] == []
    assert all(one["reason"] == reason(one["case"]) for one in report["accepted"])
    assert all(any(part in one["case"] for one in report["accepted"]) for part, _ in ACCEPTED)
    rows = [*report["config"].values(), *report["images"].values()]
    assert {name: sum(row[name] for row in rows) for name in report["tried"]} == report["tried"]
