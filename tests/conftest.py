"""Settings and fixtures of all tests: the CPU by default, a cache of compiled programs, checked shapes."""

import contextlib
import functools
import gc
import importlib
import itertools
import os
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

# `pytest -m accelerator` runs on this machine's GPU or TPU with all optimisations. Other tests run on the CPU with
# fewer optimisations (here and below), which halves compile time and hardly slows models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads wait for each other longer than tiny models compute
# Pallas' TPU interpreter waits for ever if jax has one thread, as on one core, because a callback waits for an array.
os.environ.setdefault("NPROC", str(max(2, os.cpu_count() or 1)))
os.environ.setdefault("JAX_PLATFORMS", "" if "accelerator" in sys.argv else "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    ""
    if "accelerator" in sys.argv
    else " --xla_llvm_disable_expensive_passes=true --xla_backend_optimization_level=0"
    " --xla_cpu_parallel_codegen_split_count=1"
)

import jax
import jaxtyping
import numpy as np
import pytest
from jax._src.interpreters import mlir

from tests import compile_cache
from vlkv.decoder import memory_maps

ROOT = Path(__file__).resolve().parents[1]
EMITTERS = " --xla_cpu_use_fusion_emitters=false"  # jaxlib 0.10 has this flag, later versions and some of libtpu do not

if version("jaxlib").startswith("0.10.") and "accelerator" not in sys.argv:
    os.environ["XLA_FLAGS"] += EMITTERS
    jax.devices()  # makes jaxlib read the flags
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].removesuffix(EMITTERS)

    # jax makes an MLIR context for each program, a third of the time of a small program. Here 100 programs share one.
    PROGRAMS, context = itertools.count(), functools.lru_cache(1)(lambda number, make=mlir.make_ir_context: make())
    mlir.make_ir_context = lambda: context(next(PROGRAMS) // 100)

jax.config.update("jax_compilation_cache_dir", str(compile_cache.folder(ROOT)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

try:
    import beartype  # noqa: F401
except ImportError:
    pass
else:
    # Not for modules that get users' input (processing, the command line): there wrong types must raise our own errors.
    shared = "cache decoder generation inputs masks policies towers compression." + " compression.".join(
        ["budgets", "merging", "observe", "policy", "selection", "sizes", "smooth"]
    )
    jaxtyping.install_import_hook(
        ["pallas_kernels", *(f"vlkv.{name}" for name in (*shared.split(), "families"))],
        "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
    )


# Folders whose files take longest. They are run first, so that the workers of xdist end at the same time.
LONGEST = "policies", "generation", "families", "kernels", "parity", "commands", "evaluation", "cache", "decoder"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks the cases of a test that its `@pytest.mark.default("part of an id", ...)` or `ci` does not name.

    Without a name in `default`, a case is `full`, so the default suite does not run it; without one in `ci`, it is
    `slow`, so neither does CI. "[x]" names the case x alone. A name that no case has is an error, unless single tests
    were requested, because then pytest does not collect the other cases.
    """
    named: dict[tuple[str, str], set[str]] = {}
    for item, (chosen, others) in itertools.product(items, {"default": "full", "ci": "slow"}.items()):
        marker = item.get_closest_marker(chosen)
        if marker is None:
            continue
        found = {part for part in marker.args if part in f"[{item.callspec.id}]"}
        if not found:
            item.add_marker(getattr(pytest.mark, others))
        key = item.nodeid.split("[")[0], ", ".join(marker.args)
        named[key] = named.get(key, set(marker.args)) - found
    missing = [f"{test}: {', '.join(sorted(parts))}" for (test, _), parts in named.items() if parts]
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("a marker names cases that do not exist: " + "; ".join(missing))
    items.sort(key=lambda item: LONGEST.index(name) if (name := item.path.parent.name) in LONGEST else len(LONGEST))


def pytest_collection_finish():
    """Exempts the imported modules from garbage collection, which would go through all of them every few tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)


def pytest_sessionfinish(session):
    """Bounds the cache of compiled programs; workers of xdist leave that to the process that started them."""
    if not hasattr(session.config, "workerinput"):
        compile_cache.shrink(Path(jax.config.jax_compilation_cache_dir))


TESTS_RUN = itertools.count()


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Frees the compiled programs early, because tests compile many that the library does not count.

    Only every eighth test counts the memory maps. The cache on disk keeps what took long to compile.
    """
    yield
    if next(TESTS_RUN) % 8 == 0:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            memory_maps.make_room(share=0.3)


@pytest.fixture(scope="module")
def shapes_for_arrays():
    """Disables jaxtyping for tests that put ShapeDtypeStructs, which it rejects, into dataclasses of arrays."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def shapes_in_eval():
    """Disables jaxtyping while `vlkv eval` compiles programs, which it does with ShapeDtypeStructs."""
    running = importlib.import_module("vlkv.tools.evaluation.running")
    compiling = running.compiling

    @contextlib.contextmanager
    def unchecked(*arguments):
        before = jaxtyping.config.jaxtyping_disable
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            with compiling(*arguments) as call:
                yield call
        finally:
            jaxtyping.config.update("jaxtyping_disable", before)

    running.compiling = unchecked
    yield
    running.compiling = compiling


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def miniature(tmp_path_factory):
    """Folder of the demo model with `layers` layers, for an image of `grid` x `grid` patches."""
    from tests.models import cut

    made: dict[tuple[int, int], Path] = {}

    def of(layers: int = 2, grid: int = 6) -> Path:
        if (layers, grid) not in made:
            made[layers, grid] = cut(tmp_path_factory.mktemp("miniature") / "model", layers=layers, grid=grid)
        return made[layers, grid]

    return of


@pytest.fixture(scope="session")
def params():
    """A tiny model, for tests that need no other."""
    from tests.models import SMALL, tiny_llava

    return tiny_llava(config=SMALL)


@pytest.fixture(scope="session")
def batch():
    """Prompts of unequal lengths for the tiny model, padded on the left."""
    from tests.models import unequal_batch

    return unequal_batch(padding="left")


@pytest.fixture(scope="session")
def read(params, batch):
    """The prefill of these prompts without a policy."""
    import vlkv

    return jax.jit(vlkv.read_prompt)(params, batch)


@pytest.fixture(scope="session")
def golden():
    """Loads the arrays of <name>.npz from tests/golden, or from the folder that VLKV_GOLDEN names."""
    folder = Path(os.environ.get("VLKV_GOLDEN", ROOT / "tests" / "golden"))

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return load


@pytest.fixture
def refused(capsys):
    """A command ends with status 2 and exactly one line, on stderr, which is short and says what is expected."""

    def check(main, *argv: object, says: str) -> None:
        capsys.readouterr()
        try:
            status = main([str(arg) for arg in argv])
        except SystemExit as error:
            status = error.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert err.count("\n") == 1 and err.startswith("error: ") and says in err, err
        assert len(err.partition(" (see ")[0].strip()) <= len("error: ") + 200, err

    return check
