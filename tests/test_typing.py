"""What mypy sees in a user's script: real types, and mistakes."""

import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import typing

import pytest

import vlkv

SCRIPT = """\
import vlkv
from vlkv import policies

params, processor = vlkv.load("mini")
inputs = processor("page.png", "read the page")
policy = policies.SnapKV(keep=0.2, scope="vision")
output = vlkv.generate(params, inputs, policy=policy, sampling=vlkv.Greedy(max_new_tokens=8))
kl = vlkv.kl_to_full(params, inputs, policy)
chat = vlkv.Chat(params, processor, "page.png", policy=policy)
answer = chat.ask("read the page")
"""
SEEN = ["params", "processor", "inputs", "policy", "output", "output.lengths", "output.cache_bytes", "kl", "chat",
        "answer"]  # fmt: skip
MISTAKES = {
    "vlkv.generate(params, inputs, polciy=policy)": "call-arg",
    "policies.SnapKV(keep='0.2')": "arg-type",
    "policies.SnapKV(keep=0.2, scope='image')": "arg-type",
    "vlkv.generate(params, inputs, policy=policies.SnapKV)": "arg-type",
    "vlkv.generat(params, inputs)": "attr-defined",
}


@pytest.mark.full
def test_mypy_sees_types_and_mistakes(root, tmp_path):
    lines = [*SCRIPT.splitlines(), *(f"reveal_type({name})" for name in SEEN), *MISTAKES]
    (tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    options = ["--no-error-summary", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), "script.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "MYPYPATH": str(root)},
    )  # fmt: skip
    said: dict[int, str] = {}
    for number, text in re.findall(r"^script\.py:(\d+): (.*)$", run.stdout, re.MULTILINE):
        said[int(number)] = said.get(int(number), "") + text + "\n"
    first = len(SCRIPT.splitlines()) + 1
    assert not [text for number, text in said.items() if number < first], said
    for number, name in enumerate(SEEN, first):
        assert (found := re.search(r'Revealed type is "(.*)"', said[number])), said
        assert "Any" not in found[1].replace("tuple[Any, ...]", ""), f"{name}: {found[1]}"
    for number, (line, code) in enumerate(MISTAKES.items(), first + len(SEEN)):
        assert f"[{code}]" in said.get(number, ""), f"{line}: {said.get(number)}"


def functions_of(owner):
    """The functions of a module, or the methods of a class, which are defined there."""
    for name, found in vars(owner).items():
        member = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        # The `__init__` of a dataclass repeats the annotations of its bases, whose names only their modules have.
        if inspect.isfunction(member) and not (name == "__init__" and dataclasses.is_dataclass(owner)):
            yield member


def test_every_annotation_has_a_meaning():
    """ruff removes the quotes of axes that are valid Python, such as "I * pixels"; a space in front keeps them."""
    skipped = ("__main__", "vlkv.tools.harness.lmms")  # a command; needs lmms-eval
    names = [module.name for module in pkgutil.walk_packages(vlkv.__path__, "vlkv.")]
    checked = 0
    for module in (importlib.import_module(name) for name in names if not name.endswith(skipped)):
        classes = [x for x in vars(module).values() if inspect.isclass(x) and x.__module__ == module.__name__]
        for owner in (module, *classes):
            for member in (*(() if owner is module else (owner,)), *functions_of(owner)):
                if member.__module__.startswith("vlkv"):
                    typing.get_type_hints(member, include_extras=True)
                    checked += 1
    assert checked > 1000
    assert typing.get_type_hints(vlkv.Inputs)["pixels"] is not None
