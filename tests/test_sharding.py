"""A mesh: virtual devices give the logits and tokens of one; weights are split, not copied, wherever they come from."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .meshes import CASES

CODE = """
import tempfile
from pathlib import Path
import jax, numpy as np
from checkpoints_convert.converting import convert
from jax.sharding import AxisType
import vlkv
from vlkv import policies
from vlkv.mini import CHECKPOINT, pages

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
processor = vlkv.load_processor(CHECKPOINT)
samples = list(pages.held_out(2, seed=1))
inputs = processor([s.image for s in samples], [s.question for s in samples])
answers = []
for where in (None, mesh):
    params = vlkv.load_params(CHECKPOINT, mesh=where)
    generate = jax.jit(vlkv.generate, compiler_options={"xla_llvm_disable_expensive_passes": True})
    output = generate(params, inputs, policy=policies.SnapKV(keep=0.2), sampling=vlkv.Greedy(max_new_tokens=12))
    answers.append(np.asarray(output.tokens))
np.testing.assert_array_equal(*answers)
layer = params.decoder.layers[0]
for split in (layer.query.weight, layer.key.weight, layer.gate.weight, layer.down.weight):
    array = split[...]
    shard = array.addressable_shards[0].data
    assert len(array.sharding.device_set) == 4 and 2 * shard.size == array.size, array.shape
assert layer.mlp_norm.weight[...].sharding.is_fully_replicated

with tempfile.TemporaryDirectory() as folder:
    convert(CHECKPOINT, Path(folder) / "orbax", format="orbax", progress=False)
    from_orbax = vlkv.load_params(Path(folder) / "orbax", mesh=mesh)
whole, drawn = (vlkv.init(params.config, jax.random.key(1), where) for where in (None, mesh))
for ours, a, b, c in zip(*map(jax.tree.leaves, (params, from_orbax, whole, drawn)), strict=True):
    assert a.sharding.is_equivalent_to(ours.sharding, a.ndim) and c.sharding.is_equivalent_to(ours.sharding, c.ndim)
    np.testing.assert_array_equal(ours, a)
    np.testing.assert_allclose(b, c, rtol=1e-6)
"""


def run(*arguments: str, devices: int, root) -> str:
    """What `python *arguments` prints, on so many virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_weights_are_split_from_wherever_they_come(root):
    run("-c", CODE, devices=4, root=root)


@pytest.fixture(scope="module")
def differences(root):
    return json.loads(run("-m", "tests.meshes", "compare", devices=8, root=root))


@pytest.mark.parametrize("case", [f"{mesh}: {policy}" for mesh, (_, names) in CASES.items() for policy in names])
def test_a_mesh_answers_as_one_device(differences, case):
    off, same = differences[case]
    assert off < 1e-4 and same
