"""Where tests keep compiled programs, so that later runs trace and lower but do not compile."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import platformdirs

MOST_BYTES = 300_000_000
CPU_INFO = Path("/proc/cpuinfo")


def folder(root: Path) -> Path:
    """The folder of this jaxlib and processor that outlives the checkout if there is one, else one of the checkout.

    `mkdir -p` of `shared()` turns it on. A program that a test could not compile is not in it, because jax's key
    contains the program, its options and XLA's flags.
    """
    return shared() / _key() if shared().is_dir() else root / ".jax_cache"


def shared() -> Path:
    """The folder of all jaxlibs and processors."""
    return platformdirs.user_cache_path("vlkv") / "tests"


def shrink(folder: Path, most: int = MOST_BYTES) -> None:
    """Deletes the programs that have not been used for longest, until at most `most` bytes are left."""
    used = sorted(((path.stat().st_atime, path.stat().st_size, path) for path in folder.glob("*")), reverse=True)
    total = 0
    for _, size, path in used:
        total += size
        if total > most:
            path.unlink(missing_ok=True)


def _key() -> str:
    """Programs run only on processors with the features that they were compiled for."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    features = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join([version("jaxlib"), *features]).encode()).hexdigest()[:16]
