"""`vlkv inspect --what text`: the page, the picture and the numbers of one prompt's text."""

import functools
import json

import numpy as np
import pytest

from vlkv.cli import main
from vlkv.tools.commands import inspect as command


@pytest.fixture(autouse=True)
def model(monkeypatch, miniature):
    monkeypatch.setattr(command, "CHECKPOINT", miniature(2, 6))


@pytest.mark.full
def test_the_text_of_a_prompt(tmp_path, capsys):
    page, picture = tmp_path / "kept.html", tmp_path / "kept.png"
    options = ["--what", "text", "--policy", "streamingllm(keep=0.5, sinks=2)", "--html", str(page)]
    assert main(["inspect", *options, "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["page"] == str(page) and got["picture"] is None and not picture.exists()
    assert got["pieces"][:1] == ["<s>"] and "[36 vision tokens]" in got["pieces"]
    kept = dict(zip(got["pieces"], got["kept"], strict=True))
    assert kept["<s>"] == 1 and kept[got["pieces"][-1]] == 1 and 0 < kept["[36 vision tokens]"] < 1
    tokens = np.where(np.array(got["pieces"]) == "[36 vision tokens]", 36, 1)
    assert (tokens * got["kept"]).sum() == pytest.approx(round(got["prompt_tokens"] / 2), abs=0.51)
    assert "[36 vision tokens]" in page.read_text() and "streamingllm(keep=0.5, sinks=2)" in page.read_text()
    assert main(["inspect", *options, "--out", str(picture)]) == 0
    said, note = capsys.readouterr()
    assert note.splitlines()[-1] == "no --image: of 1 held-out page of the demo model, with its own question"
    assert "of the 36 vision tokens" in said and "()" not in said and picture.exists()


def test_what_is_refused(refused, tmp_path):
    fails = functools.partial(refused, main, "inspect", "--what")
    fails("cost", "--html", tmp_path / "a.html", says="give --what text")
    fails("text", "--html", tmp_path / "a.png", says="written as HTML; give a name that ends in .html")
    fails("text", "--html", tmp_path / "no" / "a.html", says="no such folder to write the page into")
    fails("text", "--samples", 2, says="there are 2 samples: give --samples 1")
    assert not list(tmp_path.iterdir())
