"""What every test shares: the CPU unless told otherwise, compiled programs kept between runs, checked shapes."""

import itertools
import os
import sys
from importlib.metadata import version
from pathlib import Path

# `pytest -m accelerator` runs on the GPU or TPU that is here, compiled as for use. Other tests run on the CPU and are
# compiled in half the time, and less below, which costs models this small little speed.
os.environ.setdefault("JAX_PLATFORMS", "" if "accelerator" in sys.argv else "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    "" if "accelerator" in sys.argv else " --xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
)

import jax
import jaxtyping
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
EMITTERS = " --xla_cpu_use_fusion_emitters=false"  # known to jaxlib 0.10, neither to later ones nor to every libtpu

if version("jaxlib").startswith("0.10.") and "accelerator" not in sys.argv:
    os.environ["XLA_FLAGS"] += EMITTERS
    jax.devices()  # has jaxlib read them
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].removesuffix(EMITTERS)

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

try:
    import beartype  # noqa: F401
except ImportError:
    pass
else:
    # Not where users hand things in (processing, the command line): there wrong types must meet our own errors.
    shared = "budgets cache decoder extend feeding generate inputs memory merging observe policies prefill towers"
    models = (f"families.{path.parent.name}.model" for path in (ROOT / "vlkv" / "families").glob("*/model.py"))
    jaxtyping.install_import_hook(
        ["pallas_kernels", *(f"vlkv.{name}" for name in (*shared.split(), "families.family", *models))],
        "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks `full` what `@pytest.mark.default("part of an id", ...)` does not name: the other cases of a test.

    The default suite so runs the named cases only. A name that no case has is an error, unless single tests are asked
    for, of which the others are then not collected.
    """
    named: dict[tuple[str, str], set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("default")
        if marker is None:
            continue
        found = {part for part in marker.args if part in item.callspec.id}
        if not found:
            item.add_marker(pytest.mark.full)
        key = item.nodeid.split("[")[0], ", ".join(marker.args)
        named[key] = named.get(key, set(marker.args)) - found
    missing = [f"{test}: {', '.join(sorted(parts))}" for (test, _), parts in named.items() if parts]
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("cases that the default suite names and that do not exist: " + "; ".join(missing))


TESTS_RUN = itertools.count()


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Drops the compiled programs before the process has no memory mappings left: 65,530, and JAX crashes without.

    Each program holds some. Counting them takes 20 ms, so only every eighth test counts. The cache on disk keeps what
    took long to compile.
    """
    yield
    maps = Path("/proc/self/maps")
    if next(TESTS_RUN) % 8 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > 35_000:
        jax.clear_caches()


@pytest.fixture(scope="module")
def shapes_for_arrays():
    """For tests where dataclasses of arrays hold ShapeDtypeStructs, which jaxtyping takes for mistakes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def miniature(tmp_path_factory):
    """The folder of the miniature with so many of its layers, for an image of `grid` x `grid` patches."""
    from tests.miniature import cut

    made: dict[tuple[int, int], Path] = {}

    def of(layers: int = 2, grid: int = 6) -> Path:
        if (layers, grid) not in made:
            made[layers, grid] = cut(tmp_path_factory.mktemp("miniature") / "model", layers=layers, grid=grid)
        return made[layers, grid]

    return of


@pytest.fixture(scope="session")
def golden():
    """Arrays of <name>.npz in tests/golden, or in the folder that VLKV_GOLDEN names."""
    folder = Path(os.environ.get("VLKV_GOLDEN", ROOT / "tests" / "golden"))

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    def names(pattern: str) -> list[str]:
        found = sorted(path.stem for path in folder.glob(f"{pattern}.npz"))
        assert found, f"no {pattern}.npz in {folder}"
        return found

    load.names = names
    return load


@pytest.fixture(params=["some pairs", pytest.param("all pairs", marks=pytest.mark.full)])
def pairs(request):
    """Pairs of indices into two lists: each index at least once, in the whole suite all pairs.

    Every pair is a program to compile, and the two indices of a pair usually fail apart.
    """

    def of(first, second) -> list[tuple[int, int]]:
        a, b = len(first), len(second)
        if request.param == "all pairs":
            return list(itertools.product(range(a), range(b)))
        return [(i % a, i % b) for i in range(max(a, b))]

    return of
