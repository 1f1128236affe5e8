"""Block sizes per device, as data: `tuning/<device>.json` maps ops to sizes, `python -m benchmarks.tune` makes it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pallas_kernels import dispatch

_FOLDER = Path(__file__).parent / "tuning"


def block(op: str, device_kind: str | None, default: Mapping[str, int]) -> dict[str, int]:
    """The sizes that an implementation of an op works with.

    Args:
        op: key of the table: "<op>/<backend>".
        device_kind: as `jax.Device.device_kind` says it; None: of the device that is being compiled for.
        default: every size the implementation needs, safe on any device; names in a table that are not among these
            are left alone.
    """
    kind = dispatch.device_kind() if device_kind is None else device_kind
    found = {**_table(kind).get(op, {}), **_trying.get(op, {})}
    sizes = {name: int(found.get(name, size)) for name, size in default.items()}
    _asked[op] = sizes
    return sizes


def path(device_kind: str) -> Path:
    """Where the table of a device lies, made yet or not."""
    return _FOLDER / f"{'-'.join(device_kind.lower().split())}.json"


@contextlib.contextmanager
def trying(sizes: Mapping[str, Mapping[str, int]]) -> Iterator[dict[str, dict[str, int]]]:
    """For measurements: these sizes instead of the table's, for what is traced inside; yields what each op came to.

    A function that is already compiled keeps the sizes that it was traced with.
    """
    before = dict(_trying)
    _trying.update(sizes)
    _asked.clear()
    try:
        yield _asked
    finally:
        _trying.clear()
        _trying.update(before)


_trying: dict[str, Mapping[str, int]] = {}
_asked: dict[str, dict[str, int]] = {}


@functools.cache
def _table(device_kind: str) -> dict[str, dict[str, int]]:
    file = path(device_kind)
    return json.loads(file.read_text()) if file.is_file() else {}
