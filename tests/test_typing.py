"""What mypy sees in a user's script: real types, and mistakes."""

import os
import re
import subprocess
import sys

import pytest

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
