"""Which implementation of an op runs: per platform under None, by name or not at all, interpreted anywhere."""

import types

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Kernel, available, choose


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


def test_the_default_device_counts_when_no_mesh_is_set():
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.target_platform() == "cpu"
    with jax.default_device("cpu"):
        assert dispatch.target_platform() == "cpu"


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cudnn", "'cudnn' does not exist .*available: xla, reference, mosaic_tpu:interpret"),
        ("xla:interpret", "does not exist"),
        ("mosaic_tpu", "'mosaic_tpu' needs a tpu, not cpu .*available: xla"),
        ("mosaic_tpu:interpret", "cannot run this: x is odd"),
    ],
)
def test_a_name_that_cannot_run_is_refused_with_the_reason(implementations, name, words):
    with pytest.raises(ValueError, match=f"^op: implementation .*{words}"):
        choose("op", implementations, name, "xla")(3)
