"""Experts against float64 numpy, one token at a time; both ways to multiply groups; a mesh of four devices."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import Drawn
from vlkv.config import ExpertsConfig
from vlkv.decoder import experts
from vlkv.decoder.experts import Experts

WIDTH, CHANNELS = 6, 8
run = jax.jit(lambda module, x: module(x))


def make(count: int, active: int, normalised: bool = True) -> Experts:
    config = ExpertsConfig(layers=(0,), count=count, active=active, width=CHANNELS, normalised=normalised)
    return Experts(WIDTH, config, init=Drawn(0))


def one_by_one(module: Experts, x: np.ndarray) -> np.ndarray:
    """The result for tokens [n, D] from the equations."""
    router, gate, up, down = (np.asarray(weight[...], np.float64)
                              for weight in (module.router.weight, module.gate, module.up, module.down))  # fmt: skip
    result = np.zeros_like(x, np.float64)
    for i, token in enumerate(np.asarray(x, np.float64)):
        logits = router @ token
        share = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-share)[: module.active]
        whole = share[best].sum() if module.normalised else 1
        for e in best:
            g = gate[e] @ token
            result[i] += share[e] / whole * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ token)))
    return result


@pytest.mark.default("4-2-7-True", "2-1-300-False", "3-3-1-True")
@pytest.mark.parametrize(
    ("count", "active", "tokens", "normalised"),
    [(4, 2, 7, True), (2, 1, 300, False), (40, 3, 2, True), (3, 3, 1, True), (5, 2, 130, False)],
)
def test_the_sum_over_the_best_experts(count, active, tokens, normalised):
    """Blocks of one row and of many, groups that end within a block, experts without a token."""
    module = make(count, active, normalised)
    x = np.random.default_rng(1).normal(size=(tokens, WIDTH)).astype(np.float32)
    wanted = one_by_one(module, x)
    np.testing.assert_allclose(run(module, x[None])[0], wanted, atol=1e-5)
    if tokens % 2 == 0:
        np.testing.assert_allclose(run(module, x.reshape(2, -1, WIDTH)).reshape(x.shape), wanted, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_tokens(monkeypatch, rows):
    """22 tokens in blocks of at most 2 `rows`, of which the last may be partly empty."""
    monkeypatch.setattr(experts, "_ROWS", rows)
    module = make(4, 2)
    x = np.random.default_rng(5).normal(size=(2, 11, WIDTH)).astype(np.float32)
    wanted = one_by_one(module, x.reshape(22, WIDTH))
    program = jax.jit(lambda module, x: module(x)).lower(module, x)
    assert f"{2 * rows}x{WIDTH}xf32" in program.as_text()
    np.testing.assert_allclose(program.compile()(module, x).reshape(22, WIDTH), wanted, atol=1e-5)


def test_padding_does_not_change_other_tokens():
    module = make(4, 2)
    x = np.random.default_rng(4).normal(size=(2, 5, WIDTH)).astype(np.float32)
    other = x.copy()
    other[0, :3] = np.nan
    other[1, 4:] = 1e6
    before, after = run(module, x), run(module, other)
    np.testing.assert_allclose(after[0, 3:], before[0, 3:], rtol=1e-6)
    np.testing.assert_allclose(after[1, :4], before[1, :4], rtol=1e-6)


@pytest.mark.default("3")
@pytest.mark.parametrize("rows", [3, 130])
def test_a_loop_and_the_kernel_of_a_tpu_agree(rows):
    """The third expert has no row, and the last row none of these experts."""
    module = make(4, 1)
    x = np.random.default_rng(0).normal(size=(rows, WIDTH)).astype(np.float32)
    sizes = np.array([rows - 2, 1, 0, 0], np.int32)
    weights = (module.gate[...], module.up[...], module.down[...])
    ours = jax.jit(experts._in_blocks)(x, sizes, *weights)
    theirs = jax.jit(partial(experts._in_groups, interpret=True))(x, sizes, *weights)
    np.testing.assert_allclose(ours[:-1], theirs[:-1], atol=1e-5)


def test_gradients():
    """Against differences in float32, along a random direction."""
    module = make(4, 2)
    x, along = np.random.default_rng(0).normal(size=(2, 1, 9, WIDTH)).astype(np.float32)
    loss = jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(module(x)))))
    slope = (loss(x + 1e-3 * along)[0] - loss(x - 1e-3 * along)[0]) / 2e-3
    np.testing.assert_allclose(np.sum(loss(x)[1] * along), slope, rtol=2e-2)


@pytest.mark.parametrize(("rows", "count", "size"), [(8, 128, 1), (512, 128, 1), (1024, 128, 16), (2**16, 128, 128)])
def test_rows_of_a_block(rows, count, size):
    assert experts._block_size(rows, count) == size


MESH = """
import sys
import jax, numpy as np
from tests.decoder.test_experts import WIDTH, make, run
from vlkv import sharding
from vlkv.decoder import experts

experts._ROWS = int(sys.argv[1])
mesh = sharding.make_mesh(data=2, model=2)
place = lambda path, x: sharding.place("experts." + sharding.path_name(path), np.asarray(x), mesh)
# By experts if there is an even number of them, else by channels.
for count, gate, down in ((4, (2, 8, 6), (2, 6, 8)), (5, (5, 4, 6), (5, 6, 4))):
    module = make(count, 2)
    split = jax.tree_util.tree_map_with_path(place, module)
    assert split.gate[...].addressable_shards[0].data.shape == split.up[...].addressable_shards[0].data.shape == gate
    assert split.down[...].addressable_shards[0].data.shape == down
    for rows in (4, 3):  # `data` divides four rows
        x = np.random.default_rng(0).normal(size=(rows, 5, WIDTH)).astype(np.float32)
        with jax.set_mesh(mesh):
            program = run.lower(split, sharding.place_inputs(x, mesh)).compile()
            made = program(split, sharding.place_inputs(x, mesh))
        assert "all-gather" not in program.as_text() or rows == 3, "each device keeps its tokens and its weights"
        np.testing.assert_allclose(made, run(module, x), atol=1e-5)
"""


@pytest.mark.full
@pytest.mark.parametrize("rows", [512, 1], ids=["together", "in blocks of tokens"])
def test_a_mesh_splits_rows_and_experts(root, rows):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESH, str(rows)]
    done = subprocess.run(command, env=environment, cwd=root, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_parts_of_the_experts_give_parts_of_the_sum():
    module = make(4, 2)
    x = np.random.default_rng(2).normal(size=(1, 7, WIDTH)).astype(np.float32)
    weights = (*(weight[...] for weight in (module.gate, module.up, module.down)), jnp.ones(4))
    run = jax.jit(partial(experts.apply_experts, active=2, normalised=True))
    tokens = jnp.asarray(x), module.router(jnp.asarray(x))
    parts = [run(tokens, tuple(weight[first : first + 2] for weight in weights), first) for first in (0, 2)]
    assert all(np.abs(part).max() > 0.01 for part in parts)
    np.testing.assert_allclose((parts[0] + parts[1])[0], one_by_one(module, x[0]), atol=1e-5)
