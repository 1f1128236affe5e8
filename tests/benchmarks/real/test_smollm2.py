"""SmolLM2-135M-Instruct, a published checkpoint, against transformers: short prompts, and 64 tokens after 1,500."""

from __future__ import annotations

import json

import numpy as np
import pytest

import vlkv
from benchmarks.real import folders, prose
from vlkv.cli import main
from vlkv.tools.commands import verify

PROMPT, NEW = 1500, 64

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not folders.cached().is_dir() and folders.missing() is not None, reason=str(folders.missing())),
]


@pytest.fixture(scope="module")
def folder():
    return folders.smollm2()


def test_verify(folder, capsys):
    """Logits, whose standard deviation is over 3, differ by rounding alone; and 32 greedy tokens."""
    assert main(["verify", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in report["rows"]} == {"float32", "bfloat16"} and report["passed"]
    for row in report["rows"]:
        assert row["passed"] and row["logit_std"] > 3
        if row["dtype"] == "float32":
            assert row["logit_error"] < 1e-3 and row["tokens"] == row["of"] == 32


def test_long_prompt(folder):
    """Prose of 1,500 tokens in float32: the logits of all positions, and 64 greedy tokens."""
    params, processor = vlkv.load(folder, dtype="float32")
    ids = processor.encode("\n\n".join(prose.paragraphs()), begin=True)[None, :PROMPT]
    assert ids.shape == (1, PROMPT)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    wanted = verify.Reference(folder, "llama", vision=False).answer(batch, NEW, "float32")
    inputs = vlkv.Inputs.from_hf(batch, params.config, processor.buckets)
    row = verify.compare(params, inputs, wanted, wanted, NEW)
    assert row["passed"] and row["logit_error"] < 1e-3
    assert row["tokens"] == row["of"] == NEW
