"""Which implementation of an op runs: per platform under None, by name or not at all, interpreted anywhere."""

import math
import types

import jax
import numpy as np
import pytest

import vlkv
from pallas_kernels import Kernels, dispatch
from pallas_kernels.dispatch import Kernel, available, choose
from vlkv import policies


def on(platform, devices=1, kind=jax.sharding.AxisType.Auto):
    """Within it, programs are compiled for devices of `platform`, which need not be there."""
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((devices,), ("x",), axis_types=(kind,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.fixture
def implementations(monkeypatch):
    """Kernels that answer with their name, whether they were interpreted, and what they were given; odd is declined."""

    def module(kernel):
        def run(x, interpret=False):
            return kernel.name, interpret, x

        return types.SimpleNamespace(
            **{f"{kernel.op}_{kernel.name}": run}, unsupported=lambda x: "x is odd" if x % 2 else None
        )

    monkeypatch.setattr(Kernel, "_module", module)
    plain = {"xla": lambda x: ("xla", x), "reference": lambda x: ("reference", x)}
    return plain | {name: Kernel("op", name) for name in ("mosaic_tpu", "triton")}


def test_what_the_compiler_must_split_over_a_mesh_is_no_kernel(implementations):
    with on("tpu", devices=4):
        assert choose("op", implementations, None, "xla")(2)[0] == "xla"
    with on("tpu", devices=4, kind=jax.sharding.AxisType.Manual):  # as within shard_map
        assert choose("op", implementations, None, "xla")(2)[0] == "mosaic_tpu"


@pytest.mark.parametrize(
    ("platform", "even"), [("cpu", "xla"), ("tpu", "mosaic_tpu"), ("cuda", "triton"), ("gpu", "triton")]
)
def test_none_takes_the_kernel_of_the_target_platform_unless_it_declines(implementations, platform, even):
    with on(platform):
        assert choose("op", implementations, None, "xla")(2)[0] == even
        assert choose("op", implementations, None, "xla")(3) == ("xla", 3)


def test_without_a_kernel_for_the_platform_none_is_the_default(implementations):
    del implementations["triton"]
    with on("cuda"):
        assert choose("op", implementations, None, "xla")(2) == ("xla", 2)


@pytest.fixture
def host_with_a_gpu(monkeypatch):
    """Makes dispatch see a GPU as the default backend while the arrays are on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(Kernel, "_module", lambda _: types.SimpleNamespace(op_triton=jax.numpy.exp))
    return {"xla": jax.numpy.tanh, "triton": Kernel("op", "triton")}


def test_arrays_on_the_cpu_of_a_host_with_a_gpu_run_there(host_with_a_gpu):
    x = jax.device_put(1.0, jax.devices("cpu")[0])
    run = choose("op", host_with_a_gpu, None, "xla")
    want = np.float32(math.tanh(1.0))
    assert run(x) == pytest.approx(want) and jax.jit(run)(x) == pytest.approx(want)
    assert jax.vmap(run)(x[None]) == pytest.approx(want) and jax.grad(jax.jit(run))(x) == pytest.approx(1 - want**2)


def test_a_program_holds_the_implementation_of_the_platform_that_it_is_lowered_for(host_with_a_gpu):
    traced = jax.jit(choose("op", host_with_a_gpu, None, "xla")).trace(1.0)
    texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")}
    assert "tanh" in texts["cpu"] and "exponential" not in texts["cpu"]
    assert "exponential" in texts["cuda"] and "tanh" not in texts["cuda"]


def test_an_implementation_knows_the_platform_of_its_branch(host_with_a_gpu):
    found = []
    plain = {"xla": lambda x: found.append(dispatch.target_platform()) or x}
    jax.jit(choose("op", plain, "xla", "xla"))(1.0)
    assert sorted(found) == ["cpu", "gpu"] and dispatch.platforms() == ("gpu", "cpu")


def test_what_is_available_here(implementations):
    assert available(implementations) == ("xla", "reference", "mosaic_tpu:interpret", "triton:interpret")
    with on("tpu"):
        assert set(available(implementations)) - {"xla", "reference"} == {
            "mosaic_tpu", "mosaic_tpu:interpret", "triton:interpret",
        }  # fmt: skip


def test_a_named_one_runs_interpreted_or_not(implementations):
    assert choose("op", implementations, "reference", "xla")(3) == ("reference", 3)
    assert choose("op", implementations, "mosaic_tpu:interpret", "xla")(2) == ("mosaic_tpu", True, 2)
    with on("tpu"):
        assert choose("op", implementations, "mosaic_tpu", "xla")(2) == ("mosaic_tpu", False, 2)


@pytest.mark.parametrize("op", ["decode_attention", "core_attention", "attention_mass", "prefill_attention"])
def test_every_op_of_an_answer_hears_of_it(params, batch, op):
    given = dict(policy=policies.AVL(keep=0.4, core=0.1), sampling=vlkv.Greedy(max_new_tokens=5))
    with pytest.raises(ValueError, match=f"{op}: .*'none'.*available"):
        jax.eval_shape(vlkv.generate, params, batch, **given, kernels=Kernels(**{op: "none"}))
