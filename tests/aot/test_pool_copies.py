"""No decode step copies the cache: compiled for TPU chips that are not there, and for this CPU."""

import json
import os
import subprocess
import sys

import pytest

# H2O writes into the pool in every step, SnapKV only reads it: fewer cases.
GRID = [
    *(f"H2O {heads} 2 {width} 1" for heads, width in ((1, 64), (4, 128), (5, 64), (5, 80), (8, 96), (8, 256))),
    "SnapKV 5 2 64 1",
]  # fmt: skip
CASES = {
    "tpu": [*GRID, "Uneven 5 2 64 1", "Uneven 4 2 128 1", "SnapKV 4 7 128 8", "H2O 2 7 64 4", "AVL 4 2 128 1"],
    "cpu": ["SnapKV 5 2 64 1", "H2O 5 2 64 1", "Uneven 5 2 64 1", "SnapKV 4 7 128 1", "H2O 1 2 256 1"],
}


@pytest.fixture(scope="module")
def programs(root, request):
    """One process of each platform compiles the cases of all tests that were selected."""
    found = {}
    for platform in CASES:
        ours = (item for item in request.session.items if item.path == request.path)
        cases = [item.callspec.params["case"] for item in ours if item.callspec.params["platform"] == platform]
        if cases:
            if platform == "tpu":
                pytest.importorskip("libtpu")  # a wheel for Linux only
            # In a process of its own: here shapes in the place of arrays would not pass the type checker.
            quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
            command = [sys.executable, "-m", "tests.pool_copies", platform, *cases]
            result = subprocess.run(
                command, env={**os.environ, **quiet}, cwd=root, capture_output=True, text=True, check=False
            )
            assert result.returncode == 0, result.stderr[-2000:]
            found[platform] = json.loads(result.stdout)
    return found


@pytest.mark.default("cpu-H2O 5 2 64 1")  # a fifth of the time that a TPU's compiler takes
@pytest.mark.ci(
    "tpu-H2O 4", "tpu-H2O 5 2 64", "tpu-H2O 8 2 256", "tpu-Uneven 5", "tpu-SnapKV 4", "tpu-H2O 2", "AVL",
    "cpu-H2O 5", "cpu-Uneven", "cpu-SnapKV 4",
)  # fmt: skip
@pytest.mark.parametrize(("platform", "case"), [(platform, case) for platform in CASES for case in CASES[platform]])
def test_a_decode_step_copies_no_pool(programs, platform, case):
    found = programs[platform][case]
    assert not found["copies"]
    if case.endswith(" 1"):  # several chips exchange the masses of all entries, which are as large as the pool here
        assert found["temporary"] < found["pool"] / 4, "a copy in a fusion"
