"""The scripts of benchmarks/ that need hardware or peers: dry runs, and what they count, by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import gpu, peers, torch_side
from vlkv.policies import text_of
from vlkv.tools.benching.subjects import find

ROOM = [sys.executable, "-m"]


def test_the_script_for_a_gpu_refuses_a_cpu(capsys):
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "error: no GPU: jax runs on cpu; --dry-run runs a tiny model here\n"


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    assert gpu.main(["--dry-run", "--rounds", "1", "--out", str(path)]) == 0
    return path


@pytest.mark.full
def test_the_script_for_a_gpu_runs_dry(dry):
    rows = [row for row in json.loads(dry.read_text())["rows"] if "policy" in row["cell"]]
    assert [row["cell"]["policy"] for row in rows] == [
        "full", "aircache(keep=0.5)", "aircache(keep=0.1)", f"aircache(keep=0.1, cap={gpu.CAP})",
    ]  # fmt: skip
    assert all(row["cell"]["batch"] == 2 and row["prefill_seconds"] > 0 for row in rows)
    assert all(row["decode_roofline_share"] > 0 and row["prefill_roofline_share"] > 0 for row in rows)
    assert all(set(row["to_full"]) == {"prefill", "decode", "cache", "peak"} for row in rows[1:])


@pytest.mark.full
def test_it_goes_on_where_it_was_and_says_what_holds(dry, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "measure", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.setattr(torch_side, "available", lambda: "kvpress is missing")
    before = dry.read_text()
    assert gpu.main(["--dry-run", "--rounds", "1", "--out", str(dry)]) == 0
    said = capsys.readouterr().out
    assert dry.read_text() == before
    assert said.count("bytes allow") == 2 and said.count("prefill takes") == 2 and "cap 2.0: peak memory" in said
    assert "roofline" in said
    assert said.startswith("peers not measured: kvpress is missing") and said.rstrip().endswith("all measured")


def test_verdicts_are_the_promises(capsys):
    """The paper decodes 8 x 2k in 9.4 and 8.2 s. Bytes allow 0.9 and 0.8: reached at one share, not at the other."""
    subject, setting = find("tiny"), gpu.Setting(8, 2048, 64, 512)
    rows = {}
    for policy, decode, allowed in zip(gpu.CONTESTANTS[1:], (0.95, 0.9, 0.5), (0.9, 0.8, 0.5), strict=True):
        figures = {"prefill_seconds": 1.0, "decode_seconds": 9.0, "tokens_per_second": 455.0, "step_bytes": allowed}
        rows[policy] = {"to_full": {"decode": decode, "prefill": 1.01, "peak": 0.9}, **figures}
    rows[gpu.CONTESTANTS[0]] = {**figures, "step_bytes": 1.0}
    held = SimpleNamespace(
        find=lambda cell: next((row for policy, row in rows.items() if cell.get("policy") == text_of(policy)), None)
    )
    gpu.verdict(gpu.Console(width=140), subject, held, [setting], [])
    said = capsys.readouterr().out
    assert "9 / 9.4" in said and "9 / 8.2" in said and "455 / 353" in said  # beside the paper's row
    lines = [line for line in said.splitlines() if line.startswith(("holds", "FALLS"))]
    assert [line.startswith("holds") for line in lines] == [True, True, True, False, False, True, True]
    assert "takes 0.950 of the full cache's time, bytes allow 0.900" in lines[1]


def test_bytes_of_a_step_by_hand():
    """Two layers of width 32: untied, so one row of the embedding is read; 30 entries of 2 key heads of 8 channels."""
    params = find("tiny").params()
    layer = 4 * 8 * 32 + 2 * 2 * 8 * 32 + 32 * 4 * 8 + 3 * 32 * 48 + 2 * 32
    weights = 2 * layer + 32 + 64 * 32 + 32  # final norm, output head, one row of the embedding
    assert peers.step_bytes(params, 3, 10) == 4 * (weights + 2 * 2 * 30 * 2 * 8)


def test_peers_that_are_missing_are_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setattr(sys, "argv", ["peers"])
    assert peers.main() == 2
    assert capsys.readouterr().err == "error: kvpress is missing: pip install '.[peers]'\n"


def test_peers_side_by_side(tmp_path):
    """One cell at tiny sizes; without a press the first logits are the same."""
    pytest.importorskip("torch")
    pytest.importorskip("kvpress")
    path = tmp_path / "peers.json"
    argv = ["--model", "tiny", "--prompt", "80", "--method", "none", "snapkv", "--new", "3", "--rounds", "1"]
    command = [*ROOM, "benchmarks.peers", *argv, "--out", str(path)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ})
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["first_logits_differ_by"] < 1e-4
    kept = {(row["engine"], row["method"]): row["kept"] for row in cell["rows"]}
    assert kept["vlkv", "none"] == kept["sdpa", "none"] == kept["eager", "none"] == 80
    assert abs(kept["vlkv", "snapkv"] - kept["sdpa", "snapkv"]) <= 1  # kvpress rounds 0.1 x 80 down to 7
    measured = ("prefill_seconds", "step_seconds", "step_to_bytes_time", "step_to_read_time")
    assert all(row[name] > 0 for row in cell["rows"] for name in measured)
