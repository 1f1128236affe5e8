"""Published checkpoints: their folders, `vlkv verify` of them against transformers, and its record."""

import json
import re

import pytest
import tokenizers

from benchmarks.real import folders
from vlkv.cli import main
from vlkv.tools.commands import verified


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


ROW = dict(prompt="text", dtype="float32", logit_error=1e-4, allowed=0.04, logit_std=7.7, tokens=32, of=32)
REPORT = {"model": "org/name", "versions": {"vlkv": "1", "jax": "2", "torch": "3", "transformers": "4"},
          "rows": [ROW, {**ROW, "prompt": "image", "logit_error": 2e-4},
                   {**ROW, "dtype": "bfloat16", "tokens": 30, "margin": 0.1234}]}  # fmt: skip


@pytest.fixture
def document(tmp_path):
    """A copy of the shipped document, without lines in its table."""
    path = tmp_path / "models.md"
    path.write_text(re.sub(r"(?m)^\| .*\d/\d.*\n", "", verified.DOCUMENT.read_text()))
    return path


def lines(document) -> list[list[str]]:
    table = document.read_text().split("<!-- verified checkpoints -->\n")[1].split("<!-- /verified")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_snapshot_of_the_hub(tmp_path, document):
    folder = tmp_path / "snapshots" / "0123456789abcdef"
    folder.mkdir(parents=True)
    before = document.read_text()
    verified.record(REPORT, folder, document)
    first, second = lines(document)
    assert first[:3] == ["org/name", "0123456789ab", "Hugging Face hub"]
    assert first[3:7] == ["float32", "0.0002 of 0.04", "7.7", "32/32; 32/32"]
    assert second[3:7] == ["bfloat16", "0.0001 of 0.04", "7.7", "30/32, then a margin of 0.12"]
    assert second[8] == "vlkv 1, jax 2, transformers 4"
    assert re.sub(r"(?m)^\| org/name.*\n", "", document.read_text()) == before
