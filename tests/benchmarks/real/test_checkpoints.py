"""Published checkpoints against transformers: short prompts, and 64 tokens after long ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

import vlkv
from benchmarks.real import folders, prose
from vlkv.cli import main
from vlkv.tools.commands import verify

NEW = 64
# Tokens of the long prompt: longer than Gemma's windows of 512, whose logits of 262,144 tokens take 0.7 GiB.
PROMPTS = {folders.SMOLLM2: ("llama", 1500), folders.GEMMA3: ("gemma3_text", 700)}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=PROMPTS, ids=lambda checkpoint: checkpoint.name)
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


@pytest.mark.slow
def test_long_prompt(checkpoint):
    """Prose in float32: the logits of all positions, and 64 greedy tokens."""
    folder, (family, length) = folders.written(checkpoint), PROMPTS[checkpoint]
    params, processor = vlkv.load(folder, dtype="float32")
    ids = processor.encode("\n\n".join(prose.paragraphs()), begin=True)[None, :length]
    assert ids.shape == (1, length)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    wanted = verify.Reference(folder, family, vision=False).answer(batch, NEW, "float32")
    inputs = vlkv.Inputs.from_hf(batch, params.config, processor.buckets)
    row = verify.compare(params, inputs, wanted, wanted, NEW)
    assert row["passed"] and row["logit_error"] < 1e-3
    assert row["tokens"] == row["of"] == NEW
