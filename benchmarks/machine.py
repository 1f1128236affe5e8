"""Which machine, which versions, which commit: written into every result."""

from __future__ import annotations

from vlkv.benching.machine import commit, describe, memory_bytes

__all__ = ["commit", "describe", "memory_bytes"]
