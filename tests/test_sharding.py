"""A mesh: four virtual devices give the tokens of one; weights are split, not copied, from wherever they come."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_four_devices_answer_as_one():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
