"""The TPU kernels in a simulated TPU, on the watch for races, against float64 numpy.

Tiny, for the simulator is slow; the shapes are those at which these kernels could go wrong.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import exact
from pallas_kernels import decode_attention
from pallas_kernels.decode_attention import tpu_row as decode_sizes

NAME = "mosaic_tpu:interpret"


@pytest.fixture(autouse=True)
def watch():
    """The simulator notes races, it does not raise."""
    yield
    simulator = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    assert simulator.races is None or not simulator.races.races_found


def pool(heads, kv_heads, head_dim, slots, batch, dtype=jnp.float32, seed=0):
    random = np.random.default_rng(seed)
    q = 2 * random.standard_normal((batch, heads, head_dim))
    k, v = random.standard_normal((2, batch, kv_heads, slots, head_dim))
    return tuple(x.astype(dtype) for x in (q, k, v))


def expected(*arrays):
    """Attention, log-sum-exp and mass in float64; the last array [B, K, M] says what takes part, from the start."""
    return exact.segments(*arrays, bound=arrays[-1].shape[-1])


def check(got, want, dtype):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5 if dtype == jnp.float32 else 0.01)


def test_one_slot_at_the_end_of_a_pool(monkeypatch):
    """The segments fit one block of 128 slots in the lanes, which is not the first."""
    monkeypatch.setattr(decode_sizes, "_BUFFER", 1024)
    arrays, start, length = pool(16, 16, 64, 288, 1), np.full((1, 16), 280), np.ones((1, 16), int)
    options = {"max_length": 1, "return_mass": True, "implementation": NAME}
    got = decode_attention(*arrays, np.array(start), np.array(length), **options)
    check(got, expected(*arrays, start, length, np.ones((1, 16, 1), bool)), jnp.float32)


@pytest.mark.parametrize(
    ("slots", "dtype", "words"),
    [(200, jnp.float32, "200 slots is not a multiple of 16"), (64, jnp.float16, "not both bfloat16 or both float32")],
)
def test_a_pool_that_it_cannot_take_is_refused_by_name_and_run_otherwise(slots, dtype, words):
    arrays, segment = pool(2, 1, 128, slots, 1, dtype), (np.zeros((1, 1), np.int32), np.full((1, 1), 20))
    with pytest.raises(ValueError, match=f"decode_attention: implementation '{NAME}' cannot run this: .*{words}"):
        decode_attention(*arrays, *segment, implementation=NAME)
    device = jax.sharding.AbstractDevice(device_kind="TPU v4", num_cores=2, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        jaxpr = jax.make_jaxpr(decode_attention)(*arrays, *segment)
    assert "pallas_call" not in str(jaxpr)
