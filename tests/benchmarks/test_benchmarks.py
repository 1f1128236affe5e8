"""The bytes and times of the comparisons with others, and the report of the fuzzer."""

import json
import sys

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.findings import table
from benchmarks.findings.table import Series
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


def test_the_page_is_that_of_the_results():
    page = table.PAGE.read_text()
    assert page == table.written(page), "python -m benchmarks.findings --write"
    tested = [claim for claim, outcomes in table.outcomes() if "tested" not in table.verdict(outcomes)]
    published = [claim for claim in tested if claim["model"] == "SmolLM2"]
    assert len(tested) >= 20 and 2 * len(published) >= len(tested)
    assert {claim["paper"] for claim in tested} == {"AirCache", "PrefixKV", "LightKV", "CSP", "A-VL"}
    assert all(claim["why"] for claim, _ in table.outcomes()), "each verdict says what it means"


@pytest.fixture
def results(monkeypatch):
    """Four samples; the differences of a and b are 0.5 +- 0.1, so their interval is 0.5 +- 0.11."""
    layers = np.array([[1.0, 3.0], [2.0, 4.0], [1.0, 3.0], [2.0, 4.0]])
    held = {"x/a": np.array([0.6, 0.6, 1.4, 1.4]), "x/b": np.array([0.0, 0.2, 0.8, 1.0]), "x/layers": layers}
    monkeypatch.setattr(table, "results", lambda: held)


@pytest.mark.parametrize(("check", "shown"), [
    (("x/a", ">", "x/b"), True), (("x/a", "<", "x/b"), False), (("x/a", ">", 0.95), None),
    (("x/a", "=", "x/b", 0.7), True), (("x/a", "=", "x/b", 0.3), False), (("x/a", "=", "x/b", 0.5), None),
    (("x/b", ">=", "x/a", 0.7), True), (("x/b", ">=", "x/a", 0.3), False), (("x/b", "<=", "x/a", 0.0), True),
    (("x/a - x/b", ">", 0.3), True), (("x/layers[1]", ">", "x/layers[0:1]"), True),
    (("x/layers@spread", "=", 1.0, 0.01), True), (("x/layers@deviation", "=", 0.5, 0.01), True),
])  # fmt: skip
def test_a_check_by_hand(results, check, shown):
    outcome = table.evaluate(table.Check(*check))
    assert outcome.shown is shown and outcome.samples == 4
    if check == ("x/a", ">", "x/b"):
        half = 1.959964 * 0.1 * np.sqrt(4 / 3) / 2
        np.testing.assert_allclose(outcome.difference, (0.5, 0.5 - half, 0.5 + half), rtol=1e-6)


def test_verdicts():
    def found(*shown):
        return [table.Outcome(table.Check("x/a", ">", 0), 4, (0, 0), (0, 0, 0), x) for x in shown]

    assert table.verdict(found(True, True)) == "holds"
    assert table.verdict(found(True, None)) == table.verdict(found(True, False)) == "holds in part"
    assert table.verdict(found(False, None)) == "does not hold"
    assert table.verdict(found(None, None)) == "cannot be tested here"


def test_a_run_resumes(tmp_path):
    series = Series(tmp_path / "x.json")
    assert list(series.todo("x/a", 5, 2)) == [0, 2, 4]
    series.add("x", {"a": [0.123456, 1], "b": [[1, 2], [3, 4]]}, 0)
    series.add("x", {"a": [2, 3]}, 2)
    again = Series(tmp_path / "x.json")
    assert again.content["series"] == {"x/a": [0.1235, 1, 2, 3], "x/b": [[1, 2], [3, 4]]}
    assert list(again.todo("x/a", 5, 2)) == [4] and again.holds("x/a", 2) and not again.holds("x/b", 2)
    assert list(Series(tmp_path / "x.json", seconds=0).todo("x/a", 5, 2)) == []
