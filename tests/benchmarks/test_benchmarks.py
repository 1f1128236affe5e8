"""The bytes and times of the comparisons with others, and the report of the fuzzer."""

import json
import sys

import pytest

from benchmarks import peers
from tests.models import random_model
from vlkv.analysis.cost import step_bytes
from vlkv.tools.benching.settings import find


def test_bytes_of_a_step_by_hand():
    """Two layers of width 32: untied, so one row of the embedding is read; 30 entries of 2 key heads of 8 channels."""
    params = random_model(find("tiny").config)
    layer = 4 * 8 * 32 + 2 * 2 * 8 * 32 + 32 * 4 * 8 + 3 * 32 * 48 + 2 * 32
    weights = 2 * layer + 32 + 64 * 32 + 32  # final norm, output head, one row of the embedding
    assert step_bytes(params, 3, 10) == 4 * (weights + 2 * 2 * 30 * 2 * 8)


def test_peers_that_are_missing_are_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setattr(sys, "argv", ["peers"])
    assert peers.main() == 2
    assert capsys.readouterr().err == "error: kvpress is missing: pip install '.[peers]'\n"


def test_the_committed_report(root):
    """All families were run, each difference has its reason from the table, and the counts add up."""
    from benchmarks.fuzz.__main__ import ACCEPTED, reason

    report = json.loads((root / "benchmarks" / "results" / "fuzz.json").read_text())
    assert report["differs"] == []
    assert all(one["reason"] == reason(one["case"]) for one in report["accepted"])
    assert all(any(part in one["case"] for one in report["accepted"]) for part, _ in ACCEPTED)
    rows = [*report["config"].values(), *report["images"].values()]
    assert {name: sum(row[name] for row in rows) for name in report["tried"]} == report["tried"]


@pytest.mark.full
def test_a_sample_of_the_fuzzer():
    """No difference from transformers without a reason."""
    pytest.importorskip("transformers")
    from benchmarks.fuzz.__main__ import fuzz

    report = fuzz(["llama", "gemma3", "qwen2_vl"], sample=8, seed=1)
    assert report["differs"] == [] and report["tried"]["equal"] > 10
