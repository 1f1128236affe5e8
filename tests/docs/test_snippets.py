"""Every snippet and command of README.md and docs/ is executed, every example and the notebook too.

Fenced blocks of a page run one after the other in one namespace, as a reader would type them. A block below a comment
`<!-- dry run: reason -->` cannot run in a test: only the names, keywords, options, extras and files in it are checked.
The default suite checks the same of all blocks and runs none.
"""

import ast
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

import vlkv
from vlkv import analysis, loading, mini, policies, sharding
from vlkv.cli import build_parser, main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
KNOWN = {"vlkv": vlkv, "policies": policies, "sharding": sharding, "mini": mini, "analysis": analysis}
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
BY_CI = ("test command", "demo command")  # .ci/run runs them


class Block(NamedTuple):
    language: str
    text: str
    note: str

    @property
    def dry(self):
        return self.note.startswith("dry run: ") or self.note in BY_CI


def blocks(page):
    return [Block(m["language"], m["text"], m["note"] or "") for m in BLOCK.finditer(page.read_text())]


def commands(text):
    """The commands of a shell block, as lists of words without variables and comments."""
    for line in text.replace("\\\n", " ").splitlines():
        for command in re.split(r"&&|;", line):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"\w+=\S*", words[0]):
                words.pop(0)
            if words:
                yield words


def resolved(node):
    """The object of ours that a dotted name stands for; None: not ours."""
    if isinstance(node, ast.Name):
        return KNOWN.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := resolved(node.value)) is not None and inspect.ismodule(owner):
        assert hasattr(owner, node.attr), f"{owner.__name__} has no {node.attr}"
        return getattr(owner, node.attr)
    return None


def check_python(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            resolved(node)
        if isinstance(node, ast.Call) and (called := resolved(node.func)) is not None:
            named = [word.arg for word in node.keywords]
            if not any(isinstance(x, ast.Starred) for x in node.args) and None not in named:
                inspect.signature(called).bind(*node.args, **dict.fromkeys(named))


def check_command(words):
    program, *rest = words
    if program == "vlkv" and rest:
        build_parser(rest[0]).parse_args(rest)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [name for word in rest for found in re.findall(r"\.\[(.*)\]", word) for name in found.split(",")]
        assert set(asked) <= set(extras), f"no such extra: {set(asked) - set(extras)}"
    elif program == "python" and rest[0] == "-m":
        assert rest[1].startswith("lmms_eval") or importlib.util.find_spec(rest[1]), rest[1]
    elif program == "python" and rest[0].startswith("examples/"):
        assert (ROOT / rest[0]).is_file()


@pytest.fixture
def clone(tmp_path, monkeypatch, miniature):
    """A folder that looks like a clone, so that snippets write nothing into the real one; the demo model is smaller."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "MINI", miniature(layers=3))
    monkeypatch.setattr(mini, "CHECKPOINT", miniature(layers=3))
    monkeypatch.setattr("sys.stdin", io.StringIO("what does row one say?\n"))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_and_options_exist(page):
    for block in blocks(page):
        if block.language == "python":
            check_python(block.text)
        elif block.language in ("sh", "bash"):
            for words in commands(block.text):
                check_command(words)
        else:
            assert block.language in ("json", ""), f"{page.name}: say what language a block is in"


def test_most_blocks_run():
    """Most blocks are executed, and each dry run has a reason."""
    found = [block for page in PAGES for block in blocks(page) if block.language in ("python", "sh", "bash")]
    assert len(found) >= 20 and sum(block.dry for block in found) < len(found) / 2
    marked = re.findall(r"<!-- dry run(.*?)-->", "".join(page.read_text() for page in PAGES))
    assert all(re.fullmatch(r": \w[^\n]{8,} ", reason) for reason in marked)


def runs(page):
    return any(block.language in ("python", "sh", "bash") and not block.dry for block in blocks(page))


@pytest.mark.full
@pytest.mark.parametrize("page", list(filter(runs, PAGES)), ids=lambda page: page.stem)
def test_every_snippet_runs(page, clone):
    namespace: dict[str, object] = {}
    for block in blocks(page):
        if block.dry:
            continue
        if block.language == "python":
            if "transformers" in block.text and importlib.util.find_spec("transformers") is None:
                continue
            exec(compile(block.text, f"{page.name}: {block.text[:30]!r}", "exec"), namespace)
        elif block.language in ("sh", "bash"):
            for words in commands(block.text):
                if words[0] == "vlkv":
                    assert main(words[1:]) == 0, words


@pytest.mark.full
@pytest.mark.parametrize(
    "name",  # the others have a model as an argument, and tests of their own
    sorted({path.name for path in (ROOT / "examples").glob("*.py")} - {"first_hour.py", "endless_video.py"}),
)
def test_every_example_runs(name, clone, capsys):
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert re.search(r"\d", capsys.readouterr().out)
    assert os.path.exists("kept.png") == (name == "answer.py")


@pytest.mark.full
def test_the_first_hour_runs(tmp_path, monkeypatch, capfd):
    """With a tiny model; the page has the results of a published one."""
    from tests.parity.conftest import make_text, save_tokenizer

    make_text("llama", max_position_embeddings=4096, vocab_size=260).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    given = ["--model", str(tmp_path / "model"), "--questions", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["first_hour.py", *given])
    runpy.run_path(str(ROOT / "examples" / "first_hour.py"), run_name="__main__")
    rows = json.loads((tmp_path / "out" / "results" / "results.json").read_text())["rows"]
    assert len(rows) == 6 and all(row["intervals"] for row in rows) and all(row["from_full"] for row in rows[1:])
    assert (tmp_path / "out" / "kept.png").stat().st_size > 10_000
    assert "today: " in (said := capfd.readouterr().out) and "the next day: " in said


@pytest.mark.full
def test_the_notebook_runs(clone):
    cells = json.loads((ROOT / "examples" / "vlkv.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert code[0].startswith("%pip install")
    namespace: dict[str, object] = {"display": lambda shown: shown.size}
    for text in code[1:]:
        exec(compile(text, text[:30], "exec"), namespace)


@pytest.mark.full
def test_a_method_of_ones_own_has_a_name(clone, capsys):
    command = ["generate", "--model", "mini", "--image", str(mini.PAGE), "--prompt", mini.QUESTION, "--json"]
    own = ["--policy", "examples/own_method.py:KeyNorm", "--keep", "0.5", "--scope", "vision", "--max-new-tokens", "4"]
    assert main([*command, *own]) == 0
    assert json.loads(capsys.readouterr().out)["policy"].endswith("KeyNorm(keep=0.5, scope='vision')")
    question = {"image": str(mini.PAGE), "question": mini.QUESTION, "answer": "0 6 7"}
    (clone / "one.jsonl").write_text(json.dumps(question))
    compared = ["eval", "one.jsonl", "--model", "mini", "--policy", "snapkv", own[1], "--keep", "0.5"]
    compared += ["--out", "results"]
    assert main([*compared, "--max-new-tokens", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["snapkv(keep=0.5)", "examples/own_method.py:KeyNorm(keep=0.5)"]
    assert rows[0]["cache_bytes"] == rows[1]["cache_bytes"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.py:KeyNorm", "no such file"), ("examples/own_method.py:Nothing", "no class 'Nothing'"),
     ("none.such:KeyNorm", "No module")],
)  # fmt: skip
def test_a_wrong_name_of_a_method_is_named(name, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(vlkv.InputError, match=said):
        policies.make(name, keep=0.5)
