"""Every kernel as it runs on this GPU or TPU, against float64: `pytest -m accelerator`; skipped on a CPU."""

import jax
import pytest

from benchmarks import checks
from pallas_kernels import gpu

pytestmark = pytest.mark.accelerator
if jax.default_backend() == "cpu":
    pytest.skip("needs a GPU or TPU", allow_module_level=True)

CASES = list(checks.cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel(case):
    found = checks.prepare(case, jax.default_backend()).run()
    assert found["passed"], found


def test_segments_are_split_over_programs_in_some_cases_and_not_in_others():
    parts = {gpu.splits(c.batch * c.kv_heads, c.slots // 64) for c in CASES if c.op == "decode_attention"}
    assert 1 in parts and max(parts) > 4
