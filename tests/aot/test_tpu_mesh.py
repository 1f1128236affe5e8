"""Prefill and a decode step of a small model, compiled for eight TPU chips that are not there.

Every op must be its Mosaic kernel, within `shard_map`, and no collective may be as large as the cache.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("libtpu")  # a wheel for Linux only


@pytest.fixture(scope="module")
def programs(root):
    # In a process of its own: here shapes in the place of arrays would not pass the type checker.
    quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.sharding.meshes", "tpu"]
    result = subprocess.run(command, env={**os.environ, **quiet}, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.full
@pytest.mark.parametrize(("name", "parts"), [("heads", 1), ("slots", 4)])
def test_the_kernels_run_split(programs, name, parts):
    found = programs[name]
    assert found["parts"] == parts
    assert found["kernels"] == [3, 2]  # attention of the prompt, two of the mass; then segment and tail
    assert found["largest"] < found["pool"] / 8
    assert found["same place"], "prefill leaves the cache where decoding wants it"
