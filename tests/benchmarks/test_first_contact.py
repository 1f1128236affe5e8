"""The first script for a GPU: it finds planted faults and loses nothing."""

import json
import time

import jax.numpy as jnp
import pytest

from benchmarks import checks, first_contact
from benchmarks.checks import Case
from vlkv.tools.benching.results import Results


def check(monkeypatch, tmp_path, case, op=None):
    """The line that the step "kernels" writes about one case, whose op is replaced by `op`; XLA instead of a kernel."""
    monkeypatch.setitem(checks.KERNELS, "cpu", {None: "xla"})
    monkeypatch.setattr(first_contact, "DRY_CASES", (case,))
    if op is not None:
        monkeypatch.setitem(checks.OPS, case.op, op)
    results = Results(tmp_path / "out.json", "")
    first_contact.kernels(first_contact.Run(first_contact.DRY, True, results, time.time() + 100))
    (line,) = results.rows
    assert line["cell"] == {"step": "kernels", "item": case.name} and "failed" not in line, line
    return line


DECODE, CORE = Case("decode_attention", 64, 2, slots=96), Case("core_attention", 64, 2, slots=96)
MASS = Case("attention_mass", 64, 2, slots=64)
PREFILL = Case("prefill_attention", 64, 2, slots=64)


decode, prefill = (getattr(checks.pallas_kernels, case.op) for case in (DECODE, PREFILL))


def skips_its_last_block(q, k, v, start, length, **options):
    return decode(q, k, v, start, jnp.maximum(length - 1, 0) // 16 * 16, **options)


def wrong_in_one_head(*arguments, **options):
    out, lse = decode(*arguments, **options)
    return out.at[1, 3].multiply(1.02), lse


def ignores_padding(q, k, v, valid, **options):
    return prefill(q, k, v, valid=jnp.ones_like(valid), **options)


@pytest.mark.parametrize(
    ("case", "fault"),
    [(DECODE, skips_its_last_block), (DECODE, wrong_in_one_head), (PREFILL, ignores_padding)]
    + [(case, None) for case in (DECODE, CORE, MASS, PREFILL)],
    ids=lambda value: getattr(value, "op", getattr(value, "__name__", "sound")),
)
def test_a_planted_fault_is_reported_and_nothing_else(monkeypatch, tmp_path, case, fault):
    assert check(monkeypatch, tmp_path, case, fault)["passed"] == (fault is None)


def test_the_cases_cover_every_head_size_group_op_and_statistic():
    cases = list(checks.cases())
    assert {(c.head_dim, c.groups) for c in cases} >= {(h, g) for h in (64, 80, 96, 128, 256) for g in (1, 7, 8)}
    assert {c.statistic for c in cases} == {"sum", "square", "entropy", "count"}
    both = {(op, full) for op in checks.OPS for full in (True, False)}
    assert {(c.op, c.full) for c in cases} == both - {("write_slots", True), ("swap_slots", True)}
    large = next(c for c in cases if c.pool_bytes)
    assert large.pool_bytes > 2**32


def test_an_item_that_ends_the_process_is_not_started_again(tmp_path):
    """The first process dies at its second item; the next one continues after it, and no item starts too late."""
    path = tmp_path / "out.json"

    def do(item):
        if item == "b":
            raise KeyboardInterrupt  # ends the process, as a signal would
        return {"value": 1 / (item != "d")}

    def run(deadline):
        results = Results(path, "")
        first_contact.Run(first_contact.DRY, True, results, deadline).items("x", [(x, x) for x in "abcd"], do)

    with pytest.raises(KeyboardInterrupt):
        run(time.time() + 100)
    assert [row["cell"]["item"] for row in json.loads(path.read_text())["rows"]] == ["a", "b"]
    with pytest.raises(TimeoutError):
        run(time.time() - 1)
    run(time.time() + 100)
    found = {row["cell"]["item"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(found) == ["a", "b", "c", "d"] and found["c"]["value"] == 1
    assert found["b"]["failed"] == "its process ended" and found["d"]["failed"].startswith("ZeroDivisionError")
    assert "in do" in found["d"]["traceback"]
