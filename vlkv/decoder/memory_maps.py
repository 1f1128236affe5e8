"""Frees compiled programs before the process has no memory maps left.

On a CPU, a compiled program holds some hundred memory maps, and about 40 more for each decoder layer. Linux allows a
process `vm.max_map_count` of them, 65,530 by default; the compiler ends a process that has none left.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import jax

from vlkv.errors import InputError

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_FREE_FROM = 0.75  # the rest is room for the programs that are compiled until the maps are counted again
_REFUSE_FROM = 0.9


def make_room(share: float = _FREE_FROM) -> None:
    """Frees all compiled programs that the caller does not hold itself, if this share of the memory maps is used.

    Call it while a program is traced, so that programs of any function are counted, whether we or the user compile it.
    jax compiles what was freed again when it is next used. The first time, a warning says so.

    Raises:
        InputError: nearly all maps are held by something that cannot be freed, such as programs that the caller holds.
    """
    limit = most()
    if count() < share * limit:
        return
    jax.clear_caches()
    _warn_once(limit)
    held = count()
    if held > _REFUSE_FROM * limit:
        raise InputError(
            f"this process holds {held} of {limit} memory maps, too many to compile another program: use fewer methods "
            "or shapes in one process, or raise vm.max_map_count"
        )


@functools.cache  # the warnings module would show it again whenever someone changes a filter
def _warn_once(limit: int) -> None:
    warnings.warn(
        f"compiled programs hold most of the {limit} memory maps of this process: they are freed, and compiled again "
        "when they are used; raise vm.max_map_count to avoid this",
        RuntimeWarning,
        stacklevel=3,
    )


def count() -> int:
    """Number of memory maps of this process; 0 if the operating system does not list them."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


def most() -> int:
    """Number of memory maps that this process may have."""
    return int(_LIMIT.read_text()) if _LIMIT.exists() else 65_530
