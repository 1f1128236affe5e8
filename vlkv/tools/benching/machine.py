"""Description of the machine, versions and commit, which every result contains."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

import vlkv

_ROOT = Path(__file__).resolve().parents[3]


def describe() -> dict[str, Any]:
    """The description as JSON. It contains nothing that identifies a host."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")},
        "commit": commit(),
    }


def memory_bytes() -> int | None:
    """Memory of the default device, or of the machine if that is a CPU; None if unknown."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats.get("bytes_limit")
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def commit() -> str:
    """The commit of the repository that contains these sources; without a repository, the version."""
    if (_ROOT / ".git").exists() and shutil.which("git") is not None:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=False
        )
        if described.stdout.strip():
            return described.stdout.strip()
    return f"vlkv {vlkv.__version__}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
