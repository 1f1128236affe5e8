"""Names in code font in README and docs exist: objects of the library, modules, files and commands."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib

import pytest

from vlkv.cli import COMMANDS

PAGES = "README.md", "CONTRIBUTING.md", "docs/*.md"
SHORT = {"policies": "vlkv.policies", "analysis": "vlkv.analysis", "sharding": "vlkv.sharding", "mini": "vlkv.mini"}
ROOTS = "vlkv", "pallas_kernels", "checkpoints_convert", "benchmarks", "tests"


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    found, path = None, ""
    for part in name.split("."):
        path = f"{path}.{part}".removeprefix(".")
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(path)
        except ImportError:
            return False
    return True


def names(text: str) -> set[str]:
    """Dotted names of the library at the beginning of a text in code font, and modules that a shell command runs."""
    dotted = {
        SHORT.get(root, root) + rest
        for root, rest in re.findall(r"`(\w+)((?:\.[A-Za-z_]\w*)+)", text)
        if root in SHORT or root in ROOTS
    }
    return dotted | {name for name in re.findall(r"python -m ([\w.]+)", text) if name.split(".")[0] in ROOTS}


@pytest.fixture(scope="module")
def pages(root):
    return {path.name: path.read_text() for pattern in PAGES for path in root.glob(pattern)}


def test_names_exist(pages):
    assert exists("vlkv.policies.SnapKV") and not exists("vlkv.parallel.attention_mass")
    missing = [(page, name) for page, text in pages.items() for name in sorted(names(text)) if not exists(name)]
    assert not missing


def test_files_exist(pages, root):
    pattern = r"`((?:vlkv|pallas_kernels|checkpoints_convert|benchmarks|tests|docs|examples)/[\w/.-]+)`"
    missing = [
        (page, path)
        for page, text in pages.items()
        for path in re.findall(pattern, text)
        if not (root / path).exists() and page != "CONTRIBUTING.md"
    ]
    assert not missing


def test_commands_exist(pages):
    used = set()
    for page, text in pages.items():
        shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
        used |= {(page, name) for name in re.findall(r"`vlkv ([a-z]+)\b", text)}
        used |= {(page, name) for name in re.findall(r"^vlkv ([a-z]+)\b", shell, re.MULTILINE)}
    assert used and not [(page, name) for page, name in used if name not in COMMANDS]


def test_the_table_of_extras_is_complete(pages, root):
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = pages["README.md"].split("## Extras")[1].split("## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", "".join(first))) == sorted(extras)
