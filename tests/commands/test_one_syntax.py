"""The README's best composition runs in every command that takes a policy, by the same text."""

import io
import json
import re
import subprocess
import sys

import pytest

import vlkv
from benchmarks import quality_sections, quality_tables
from vlkv import policies
from vlkv.cli import main
from vlkv.mini import PAGE

ASK = ["--image", str(PAGE), "--prompt", "what does row two say?", "--max-new-tokens", "3"]


@pytest.fixture(scope="module")
def best(root):
    found = re.findall(r'^best = "(compose\(.*\))"$', (root / "README.md").read_text(), re.MULTILINE)
    assert len(found) == 1 and found[0] in (root / "README.md").read_text().split("vlkv eval", 1)[1]
    return found[0]


def test_it_is_the_best_composition_of_the_measurements(best):
    name, policy = quality_tables.ON_ROWS, policies.make(best, keep=0.1)
    assert policy == policies.compose(quality_sections.compositions()[name], store=policies.KIVI(bits=4))
    assert policies.make(best.replace("aircache", "AirCache").replace("kivi", "KIVI"), keep=0.1) == policy


OWN = "from vlkv import policies\nclass Own(policies.SnapKV):\n    pass\n"


@pytest.mark.parametrize(
    "name", ["a b", "é 文", "a(1)", "a,b", "a#b", "a+b", "a@b", "a\\b", "a=b", "a'b", "store=x", "[x]"]
)
def test_a_file_of_ones_own_may_have_any_path(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    text = f"{folder}/own.py:Own"
    policy = policies.make(text, keep=0.5)
    assert type(policy).__name__ == "Own"
    assert policies.make(f"{text}(keep=0.5)") == policy == policies.make(policies.text_of(policy))
    for composed in (f"compose({text}, store=kivi(bits=4))", f"compose( {text}(keep=0.5), answer=2)",
                     f"compose(snapkv(keep=0.5), allocate={text}, store=kivi(bits=4))"):  # fmt: skip
        whole = policies.make(composed, keep=0.5)
        assert policy in whole.parts and policies.make(policies.text_of(whole)) == whole


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(vlkv.InputError, match=r"C:\\Users\\me\\own\.py: no such file"):
        policies.make(r"C:\Users\me\own.py:Own", keep=0.5)


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"image": str(PAGE), "question": "what does row two say?", "answers": ["1"]}))
    return str(file)


@pytest.mark.default("generate", "eval")
@pytest.mark.parametrize("command", ["generate", "chat", "eval", "frontier", "inspect", "bench", "plan"])
def test_every_command_reads_the_text_of_the_readme(command, best, questions, miniature, tmp_path, capsys, monkeypatch):
    model, out = str(miniature()), str(tmp_path / "results")
    full = policies.text_of(policies.make(best, keep=0.2))
    argv = {
        "generate": [*ASK, "--model", model, "--keep", "0.2", "--json"],
        "chat": ["--model", model, "--image", str(PAGE), "--keep", "0.2", "--max-new-tokens", "3"],
        "eval": [questions, "--model", model, "--keep", "0.2", "--out", out, "--max-new-tokens", "3", "--json"],
        "frontier": [questions, "--model", model, "--bytes", "0.2", "--bits", "4", "--out", out, "--json"],
        "inspect": ["--what", "budgets", "--model", model, *ASK, "--keep", "0.2", "--json"],
        "bench": ["--model", "tiny", "--prompt", "40", "--text", "8", "--new", "2", "--rounds", "1", "--keep", "0.2",
                  "--dry-run"],
        "plan": ["mini", "--topology", "v5e:1x1", "--prompt", "640", "--keep", "0.2", "--json"],
    }[command]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("what does row two say?\n"))
    if command == "plan":  # in a process without checked shapes, because a plan has no arrays
        line = [sys.executable, "-m", "vlkv", command, *argv, "--policy", best]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    else:
        assert main([command, *argv, "--policy", best]) == 0
        said = capsys.readouterr().out
    if command == "bench":  # a table, whose cells are folded
        shown = policies.text_of(policies.make(best, keep=0.2), scope=True)
        assert "scope='vision'" in shown and "".join(shown.split()) in "".join(said.split())
    elif command == "chat":
        assert said.strip()
    elif command == "frontier":  # it chooses the keep
        assert "smooth=smooth(8, one_sided=True, pooling='max')" in said
    else:
        assert full in said
