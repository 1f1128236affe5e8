"""Published checkpoints: their folders, `vlkv verify` of them against transformers, and its record."""

import json
import re

import pytest
import tokenizers

from benchmarks.real import folders
from vlkv.cli import main
from vlkv.errors import InputError
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


PACKED = folders.SMOLLM2._replace(file=lambda work: folders.Path("weights.gguf"))


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(folders, "missing", lambda checkpoint: None)


def test_an_interrupted_writer_leaves_nothing(tmp_path, installed, monkeypatch):
    def interrupted(checkpoint, file, folder):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(folders, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folders.written(PACKED, tmp_path)
    assert list((tmp_path / "real").iterdir()) == []


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


def test_lines_of_the_same_checkpoint_are_replaced(tmp_path, document):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "source.json").write_text(json.dumps({"name": "N", "revision": "R", "source": "a | b"}))
    for tokens, revision in ((31, "R"), (32, "R"), (32, "S")):
        (folder / "source.json").write_text(json.dumps({"name": "N", "revision": revision, "source": "a | b"}))
        verified.record({**REPORT, "rows": [{**ROW, "tokens": tokens, "margin": 0.0}]}, folder, document)
    assert [line[:4] + line[6:7] for line in lines(document)] == [
        ["N", "R", "a / b", "float32", "32/32"], ["N", "S", "a / b", "float32", "32/32"],
    ]  # fmt: skip


def test_what_cannot_be_recorded(tmp_path):
    with pytest.raises(InputError, match="has no table of verified checkpoints"):
        verified.record(REPORT, tmp_path, tmp_path / "models.md")
    (tmp_path / "source.json").write_text('{"name": "N"}')
    with pytest.raises(InputError, match="expected the texts name, revision, source"):
        verified.source_of("N", tmp_path)
