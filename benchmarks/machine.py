"""Which machine, which versions, which commit: written into every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax


def describe() -> dict[str, Any]:
    """JSON-able; says nothing that would identify a host."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "flax", "numpy")},
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    here = Path(__file__).parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"
