"""Published checkpoints: their folders, `vlkv verify` of them against transformers, and its record."""

import json

import pytest
import tokenizers

from benchmarks.real import folders
from vlkv.cli import main


@pytest.fixture(scope="module", params=(folders.SMOLLM2, folders.GEMMA3), ids=lambda checkpoint: checkpoint.name)
def checkpoint(request):
    reason = folders.missing(request.param)
    if reason is not None and not folders.cached(request.param).is_dir():
        pytest.skip(reason)
    return request.param


@pytest.mark.full
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


@pytest.mark.full
def test_gemma_splits_text_as_published():
    """Its GGUF file has the scores of sentencepiece. The ids are those of the published tokenizer."""
    if folders.missing(folders.GEMMA3) is not None and not folders.cached(folders.GEMMA3).is_dir():
        pytest.skip("the packages are not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(folders.written(folders.GEMMA3) / "tokenizer.json"))
    for text, ids in (("The capital of France is", [2, 818, 5279, 529, 7001, 563]),
                      ("Hello   world\n\n\n", [2, 9259, 139, 12392, 109])):  # fmt: skip
        assert tokenizer.encode(text).ids == ids and tokenizer.decode(ids) == text
