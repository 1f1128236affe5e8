"""Published checkpoints against transformers."""

from __future__ import annotations

import json

import pytest

from benchmarks.real import folders
from vlkv.cli import main

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=(folders.SMOLLM2, folders.GEMMA3), ids=lambda checkpoint: checkpoint.name)
def checkpoint(request):
    reason = folders.missing(request.param)
    if reason is not None and not folders.cached(request.param).is_dir():
        pytest.skip(reason)
    return request.param


@pytest.mark.ci("SmolLM2")
def test_verify(checkpoint, capsys):
    """Logits, whose standard deviation is over 3, differ by rounding alone; and 32 greedy tokens."""
    assert main(["verify", str(folders.written(checkpoint)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in report["rows"]} == {"float32", "bfloat16"} and report["passed"]
    for row in report["rows"]:
        assert row["passed"] and row["logit_std"] > 3
        if row["dtype"] == "float32":
            assert row["logit_error"] < 1e-3 and row["tokens"] == row["of"] == 32
