"""The first script for a GPU: it finds planted faults, loses nothing, and runs dry from a plain copy of the tree."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import checks, clock, exact, first_contact
from benchmarks.checks import Case


def check(monkeypatch, tmp_path, case, op=None):
    """The line that the step "kernels" writes about one case, whose op is replaced by `op`; XLA instead of a kernel."""
    monkeypatch.setitem(checks.KERNELS, "cpu", {None: "xla"})
    monkeypatch.setattr(first_contact, "_dry_cases", lambda: [case])
    if op is not None:
        monkeypatch.setitem(checks.OPS, case.op, op)
    journal = first_contact.Journal(tmp_path / "out.jsonl", time.time())
    first_contact.do_steps(first_contact.Run(first_contact.DRY, True, journal, time.time() + 100), ["kernels"])
    (line,) = journal.lines()
    assert line["step"] == "kernels" and line["item"] == case.name and "failed" not in line, line
    return line


DECODE, CORE = Case("decode_attention", 64, 2, slots=96), Case("core_attention", 64, 2, slots=96)
MASS = Case("attention_mass", 64, 2, slots=64)
PREFILL = Case("prefill_attention", 64, 2, slots=64)


def skips_its_last_block(q, k, v, start, length, **options):
    return checks.pallas_kernels.decode_attention(q, k, v, start, jnp.maximum(length - 1, 0) // 16 * 16, **options)


def reads_a_poisoned_slot(q, k, v, start, length, **options):
    """One past the end of each segment that has a slot there."""
    longer = length + (start + length < k.shape[2])
    return checks.pallas_kernels.decode_attention(q, k, v, start, longer, **options)


def wrong_in_one_head(q, k, v, start, length, **options):
    out, lse = checks.pallas_kernels.decode_attention(q, k, v, start, length, **options)
    return out.at[1, 3].multiply(1.02), lse


def loses_a_row(q, k, row_weight, **options):
    """Of 64."""
    return checks.pallas_kernels.attention_mass(q, k, row_weight=row_weight.at[:, -1].set(0), **options)


def ignores_padding(q, k, v, valid, **options):
    return checks.pallas_kernels.prefill_attention(q, k, v, valid=jnp.ones_like(valid), **options)


def differs_from_run_to_run(q, k, v, start, length, **options):
    out, lse = checks.pallas_kernels.decode_attention(q, k, v, start, length, **options)
    noise = jax.pure_callback(lambda: np.float32(time.perf_counter() % 1e-3), jax.ShapeDtypeStruct((), jnp.float32))
    return out * (1 + noise), lse


@pytest.mark.parametrize(
    ("case", "fault"),
    [(DECODE, skips_its_last_block), (DECODE, reads_a_poisoned_slot), (DECODE, wrong_in_one_head),
     (DECODE, differs_from_run_to_run), (MASS, loses_a_row), (PREFILL, ignores_padding)],
)  # fmt: skip
def test_a_planted_fault_is_reported(monkeypatch, tmp_path, case, fault):
    line = check(monkeypatch, tmp_path, case, fault)
    assert not line["passed"]
    assert line["equal_bits"] == (fault is not differs_from_run_to_run)


@pytest.mark.parametrize("case", [DECODE, CORE, MASS, PREFILL], ids=lambda case: case.op)
def test_ops_without_a_fault_pass(monkeypatch, tmp_path, case):
    assert check(monkeypatch, tmp_path, case)["passed"]


def test_the_cases_cover_every_head_size_group_op_and_statistic():
    cases = list(checks.cases())
    assert len({case.name for case in cases}) == len(cases)
    assert {(c.head_dim, c.groups) for c in cases} >= {(h, g) for h in (64, 80, 96, 128, 256) for g in (1, 7, 8)}
    assert {c.statistic for c in cases} == {"sum", "square", "count"}
    both = {(op, full) for op in checks.OPS for full in (True, False)}
    assert {(c.op, c.full) for c in cases} == both - {("write_slots", True), ("swap_slots", True)}
    large = next(c for c in cases if c.pool_bytes)
    assert large.pool_bytes > 2**32


def test_probabilities_in_float64_by_hand():
    """Logits 0, log 2 and log 3 with the third key masked, and 1 in the denominator."""
    q, k = np.ones((1, 1, 1)), np.log([[[1.0], [2.0], [3.0]]])
    p, allowed = exact.probabilities(q, k, [True, True, False], [2], softmax_n=1.0)
    np.testing.assert_allclose(p, [[[1 / 4, 2 / 4, 0]]])
    assert allowed.tolist() == [[True, True, False]]
    out, lse, mass = exact.segments(q[0][None], k[:, None], k[:, None], [[1]], [[2]], None)
    assert mass[0, 0, :2] == pytest.approx([2 / 5, 3 / 5]) and lse[0, 0] == pytest.approx(np.log(5))
    assert out[0, 0, 0] == pytest.approx((2 * np.log(2) + 3 * np.log(3)) / 5)


def test_a_crash_costs_one_item(monkeypatch, tmp_path):
    """The first process dies at its second item; the next one goes on behind it."""
    journal, started = first_contact.Journal(tmp_path / "out.jsonl", time.time()), []

    def child(args, steps, began, end, marker, errors):
        started.append(list(steps))
        run = first_contact.Run(first_contact.DRY, True, journal, end, marker)
        errors.write_text("CUDA_ERROR_ILLEGAL_ADDRESS")

        def do(item):
            if item == "b":
                raise KeyboardInterrupt  # ends the process, as a signal would
            return {"value": 1}

        try:
            run.items("decode", [(item, item) for item in "abc"], do)
        except KeyboardInterrupt:
            return -11
        return 0

    monkeypatch.setattr(first_contact, "_run_child", child)
    monkeypatch.setattr(first_contact, "GROUPS", ((("decode",), 10),))
    args = first_contact.argparse.Namespace(steps=["decode"])
    first_contact._watch(args, journal, time.time() + 60)
    lines = {line["item"]: line for line in journal.lines()}
    assert started == [["decode"]] * 2 and list(lines) == ["a", "b", "c"]
    assert lines["b"]["failed"] == "its process ended with -11" and "ILLEGAL" in lines["b"]["traceback"]
    assert lines["c"]["value"] == 1


def test_a_step_that_fails_is_a_line_and_so_is_an_item(monkeypatch, tmp_path):
    journal = first_contact.Journal(tmp_path / "out.jsonl", time.time())
    run = first_contact.Run(first_contact.DRY, True, journal, time.time() + 100)

    def broken(run):
        run.items("limits", [("copy", 1), ("read", 0)], lambda x: {"value": 1 / x})
        raise RuntimeError("no device")

    monkeypatch.setitem(first_contact.STEPS, "limits", broken)
    first_contact.do_steps(run, ["limits"])
    copy, read, whole = journal.lines()
    assert copy["value"] == 1 and read["failed"].startswith("ZeroDivisionError") and "no device" in whole["failed"]
    run.deadline = time.time()
    run.items("limits", [("product", 1)], lambda _: {})
    assert journal.lines()[-1]["skipped"] == "no time left"
    assert first_contact._end(journal) == 1


def test_kernels_of_a_trace_by_time(tmp_path):
    folder = tmp_path / "plugins" / "profile" / "now"
    folder.mkdir(parents=True)
    event = {"ph": "X", "pid": 1, "tid": 7}
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
        {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}},
        {**event, "name": "gemm", "dur": 20.0}, {**event, "name": "gemm", "dur": 40.0},
        {**event, "name": "decode_attention", "dur": 20.0}, {"ph": "X", "pid": 2, "tid": 1, "name": "host", "dur": 999},
    ]  # fmt: skip
    (folder / "a.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = first_contact.top_kernels(tmp_path)
    assert found["device_events"] and found["milliseconds"] == pytest.approx(0.08)
    assert [(k["kernel"], k["calls"], k["share"]) for k in found["kernels"]] == [
        ("gemm", 2, 0.75), ("decode_attention", 1, 0.25),
    ]  # fmt: skip


def test_every_method_that_is_timed_can_be_made():
    sizes = first_contact.Sizes()
    for name in (*sizes.methods, *sizes.answers):
        first_contact.make_policy(name, 0.1).check_model(2)


def test_segments_rotate_through_the_pool():
    assert clock.rotating(5, pool=100, segment=33, unit=16).tolist() == [0, 48, 0, 48, 0]
    assert clock.rotating(3, pool=32, segment=32).tolist() == [0, 0, 0]


def test_a_chain_calls_every_turn():
    timing = clock.chain(lambda x, turn, y: x + turn * y, jnp.zeros(3), jnp.ones(3), calls=5)
    assert timing.run(*timing.arguments).tolist() == [10.0] * 3 and timing.seconds() > 0


# --- the whole script, in processes of its own --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory, root):
    """A copy of the tracked files, without .git, where torch cannot be imported."""
    folder = tmp_path_factory.mktemp("tree")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout.split(b"\0")
    archive = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=root, input=b"\0".join(filter(None, files)),
                             capture_output=True, check=True)  # fmt: skip
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    (folder / "torch.py").write_text("raise ImportError('torch is not here')\n")
    return folder


def start(tree, out, *options, **environment):
    without = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.first_contact", "--dry-run", "--minutes", "20", "--out", str(out), *options],
        cwd=tree, env={**without, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_the_dry_run_is_complete(tree, tmp_path):
    process = start(tree, tmp_path / "out.jsonl", "--cache", str(tmp_path / "cache"))
    _, errors = process.communicate(timeout=330)
    lines = lines_of(tmp_path / "out.jsonl")
    assert process.returncode == 0, (errors[-1000:], lines[-1])
    assert {line["step"] for line in lines} == {*first_contact.STEPS, "end"}
    commit = next(line for line in lines if line["item"] == "commit")
    assert commit["commit"] == "unknown" or commit["commit"].startswith("vlkv ")
    assert lines[-1]["checks"] == lines[-1]["passed"] == 6


@pytest.mark.full
def test_a_killed_run_leaves_whole_lines(tree, tmp_path):
    out = tmp_path / "out.jsonl"
    process = start(tree, out, "--steps", "versions", "limits", "decode", "--cache", str(tmp_path / "cache"))
    until = time.time() + 120
    while time.time() < until and len(out.read_text().splitlines() if out.is_file() else ()) < 4:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2)  # the process that computes ends when the one that started it has gone
    held = out.read_text()
    assert len(lines_of(out)) >= 4 and held.endswith("\n") and '"end"' not in held
    time.sleep(2)
    assert out.read_text() == held


@pytest.mark.full
def test_two_processes_of_four_devices_each(tree, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=4"
    several = "--coordinator", f"localhost:{port}", "--processes", "2", "--cache", str(tmp_path / "cache"), "--process"
    second, first = (start(tree, tmp_path / f"{i}.jsonl", *several, str(i), XLA_FLAGS=flags) for i in (1, 0))
    for process in (first, second):
        _, errors = process.communicate(timeout=330)
        assert process.returncode == 0, errors[-1000:]
    assert not (tmp_path / "1.jsonl").exists()
    lines = lines_of(tmp_path / "0.jsonl")
    assert {line["step"] for line in lines} == {*first_contact.STEPS, "end"} and not lines[-1]["failures"]
    timed = [line for line in lines if line["step"] == "collectives"]
    assert len(timed) == 4 and all(x["devices"] == 8 and x["processes"] == 2 and x["microseconds"] > 0 for x in timed)
