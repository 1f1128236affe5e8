"""`vlkv bench`: a tiny grid, resumption, bad input, the dry runs."""

import json
import subprocess
import sys

import numpy as np
import pytest

import vlkv
from tests.models import random_model
from vlkv.analysis.cost import tree_bytes
from vlkv.cli import main
from vlkv.tools import benching
from vlkv.tools.benching import measuring, settings

GRID = ["bench", "--model", "tiny", "--prompt", "40", "--text", "8", "--new", "3", "--rounds", "2"]


@pytest.fixture(scope="module", autouse=True)
def drawn():
    """Parameters are drawn without compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benching.settings.Subject, "params", lambda self: random_model(self.config))
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A grid of one setting, stopped after it by ctrl-C before the second."""
    path, calls, measure = tmp_path_factory.mktemp("bench") / "grid.json", [], measuring.measure

    def once(*args, **kwargs):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return measure(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "measure", once)
        assert main([*GRID, "--batch", "2", "3", "--keep", "0.5", "--out", str(path)]) == 130
    return path, json.loads(path.read_text())


def test_a_cell_says_what_it_is_and_what_it_took(measured):
    _, held = measured
    full, snap = held["rows"]
    assert [row["cell"]["policy"].split("(")[0] for row in held["rows"]] == ["full", "snapkv"]
    assert held["machine"]["jax"] and held["machine"]["device"] and full["commit"]
    # Two layers, two key heads of 8 channels, float32; 40 prompt entries (3 segments of 16) and 3 new ones. The pool
    # also has the number of the token of each slot.
    slot, number = 2 * 2 * 8 * 4, 2 * 4
    assert full["cache_bytes"] == 2 * (slot * 2 * (48 + 3) + number * 2 * 48)  # two rows
    assert full["kept_per_layer"] == 40
    assert snap["kept_per_layer"] == 20  # half of all: SnapKV's scope
    for row in held["rows"]:
        assert len(row["prefill_times"]) == len(row["decode_times"]) == 2
        assert row["prefill_seconds"] == pytest.approx(np.median(row["prefill_times"]))
        assert row["step_seconds"] == pytest.approx(row["decode_seconds"] / 2)
        assert row["tokens_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert row["peak"]["bytes"] >= tree_bytes(benching.settings.find("tiny").shapes)
        assert row["peak"]["source"] == "compiled.memory_analysis"  # a CPU does not count
        assert row["first_call_seconds"] >= row["compile_seconds"] > 0
    ratio = np.median(np.array(snap["decode_times"]) / full["decode_times"])
    assert snap["to_full"]["decode"] == pytest.approx(ratio)
    assert snap["to_full"]["cache"] == pytest.approx(snap["cache_bytes"] / full["cache_bytes"])


def test_what_is_there_is_not_measured_again(measured, capsys, monkeypatch):
    path, before = measured
    seen = []

    def pretend(params, cells, **_):
        seen.append([(setting.batch, type(policy).__name__) for setting, policy in cells])
        return [{"error": "out of memory"} for _ in cells]

    monkeypatch.setattr("vlkv.tools.benching.measuring.measure", pretend)
    assert main([*GRID, "--batch", "2", "3", "--keep", "0.5", "0.25", "--out", str(path)]) == 0
    assert "out of memory" in capsys.readouterr().out
    new, both = [(2, "Full"), (2, "SnapKV")], [(3, "Full"), (3, "SnapKV"), (3, "SnapKV")]
    assert seen == [new, both]  # batch 2: only the new keep, and full
    after = json.loads(path.read_text())["rows"]
    assert after[:2] == before["rows"] and len(after) == 6
    assert not list(path.parent.glob("*.part"))


def test_results_of_another_machine_are_not_mixed(measured, refused, tmp_path):
    _, held = measured
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**held, "machine": {**held["machine"], "device": "TPU v5e"}}))
    refused(main, *GRID, "--out", str(other), says="measured with device TPU v5e")
    for text, says in (("[]", "expected an object"), ('{"rows": 3}', "not a file with results of vlkv bench")):
        other.write_text(text)
        refused(main, *GRID, "--out", str(other), says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "llava-1.5-8b"], "did you mean llava-1.5-7b"),
        (["--policy", "snapkw"], "did you mean snapkv"),
        (["--keep", "1.5"], "must lie in (0, 1]"),
        (["--keep", "0.5", "--budget", "3"], "give only one of them"),
        (["--batch", "0"], "batch=0 must be at least 1"),
        (["--new", "1"], "new=1 must be at least 2"),
        (["--text", "99"], "text=99 must not exceed"),
        (["--rounds", "0"], "--rounds 0"),
        (["--programs", "--batch", "1", "2"], "--programs: give one --batch"),
        (["--mesh", "data=2"], "expected data=D,model=M"),
        (["--pod"], "give --mesh too"),
        (["--out", "nowhere/x.json"], "no such folder"),
        (["--model", "vicuna-1.5-7b", "--policy", "aircache"], "has none: use --scope all"),
        (["--model", "llava-1.5-7b"], "the device has 1.0"),  # before weights are made
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_anything_is_compiled(refused, monkeypatch, options, says):
    monkeypatch.setattr("jax.stages.Lowered.compile", lambda *_, **__: pytest.fail("compiled"))
    monkeypatch.setattr("vlkv.tools.benching.settings.memory_bytes", lambda: 2**30)
    refused(main, *GRID[:7], *options, says=says)


def test_batches_together_are_compared_with_the_first(measured, monkeypatch, capsys):
    """The median of the ratios of each round; results of batches that were measured apart do not count."""
    path, _ = measured
    times = iter(np.arange(1.0, 100.0))
    monkeypatch.setattr(measuring, "run_pair", lambda *_: (next(times), next(times), 1.0, None))
    assert main([*GRID, "--batch", "2", "3", "--policy", "full", "--together", "--out", str(path)]) == 0
    first, second = (row for row in json.loads(path.read_text())["rows"] if "together" in row["cell"])
    assert [row["cell"]["batch"] for row in (first, second)] == [2, 3] and "to_first" not in first
    ratios = {
        name: np.median(np.array(second[f"{name}_times"]) / first[f"{name}_times"]) for name in ("prefill", "decode")
    }
    assert second["to_first"] == pytest.approx({"batch": 2, "prompt": 40, **ratios})
    assert "step: relative to batch 2, prompt 40" in capsys.readouterr().out


@pytest.mark.full
def test_compile_times_of_an_evaluation(tmp_path, refused):
    path = tmp_path / "times.json"
    command = [sys.executable, "-m", "vlkv", "bench", "--programs", "--model", "tiny", "--prompt", "64", "--new", "4"]
    options = ["--policy", "full", "knorm", "--keep", "0.5", "--out", str(path)]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    programs = json.loads(path.read_text())["programs"]
    expected = ["read the prompt", "fill, full", "decode, full", "fill, knorm(keep=0.5)", "decode, knorm(keep=0.5)"]
    assert [row["program"] for row in programs] == expected
    assert all(row["compile_seconds"] > 0 and row["processor_seconds"] > 0 for row in programs)
    assert f"{sum(row['processor_seconds'] for row in programs):.1f}" in done.stdout
    path.write_text('{"rows": []}')
    refused(main, *command[3:], *options, says="contains other results")


def test_dry_run_counts_bytes(capsys):
    options = ["--model", "llava-1.5-7b", "--dtype", "bfloat16", "--batch", "8", "--prompt", "2048", "--new", "512"]
    assert main(["bench", *options, "--policy", "aircache", "kivi(bits=4)", "--keep", "0.1", "--dry-run"]) == 0
    table = capsys.readouterr().out
    # 32 layers, 32 heads of 128 channels, 2 bytes, keys and values: 0.5 MiB an entry.
    assert f"{8 * (2048 + 512) * 0.5 / 1024:.4f}" in table
    # KIVI: 4 bits; a scale and a minimum of 2 bytes for 32 numbers. New tokens are not quantised.
    assert f"{8 * (2048 * 0.5 * (1 / 4 + 2 / 32) + 512 * 0.5) / 1024:.4f}" in table
    # All parameters but those behind the tower's last block but one, which nothing reads.
    assert f"{2 * (7_063_427_072 - 12_596_224) / 2**30:.3f}" in table


def test_prompts_have_the_asked_shape():
    config = vlkv.presets["qwen2-vl-7b"]
    inputs = settings.make_inputs(config, 2, 1300, 1236)
    assert inputs.positions.shape == (2, 1300, 3) and inputs.is_vision.sum(axis=1).tolist() == [1236, 1236]
    assert inputs.max_images == 3 and (inputs.max_vision, inputs.max_text) == (1236, 64)
    np.testing.assert_array_equal(inputs.grid[1, 576 + 25], [1, 1, 1])  # the second image, 24 wide
    np.testing.assert_array_equal(inputs.grid[1, 2 * 576 + 10], [2, 1, 1])  # 84 left: 9 wide
    np.testing.assert_array_equal(inputs.grid[0, 1236:], np.full((64, 3), -1))


def test_the_ratio_of_peaks_is_that_of_two_figures_of_one_kind():
    def row(source, size, planned):
        times = {"prefill_times": [1.0], "decode_times": [1.0], "prefill_seconds": 1.0, "decode_seconds": 1.0}
        peak = {"source": source, "bytes": size, "planned": planned}
        return times | {"tokens_per_second": 1.0, "cache_bytes": 1, "peak": peak}

    full = row("device.memory_stats", 400, 200)
    for one, ratio in ((row("device.memory_stats", 300, 50), 0.75), (row("compiled.memory_analysis", 50, 50), 0.25)):
        assert measuring.compared(one, full)["to_full"]["peak"] == ratio
