"""What every test shares: the CPU unless told otherwise, compiled programs kept between runs, checked shapes."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

try:
    import beartype  # noqa: F401
except ImportError:
    pass
else:
    jaxtyping.install_import_hook(
        ["vlkv", "pallas_kernels"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    )


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def golden():
    """Arrays of tests/golden/<name>.npz."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(ROOT / "tests" / "golden" / f"{name}.npz", allow_pickle=False) as arrays:
            return dict(arrays)

    return load
