"""Block sizes per device: `tuning/<device>.json` maps ops to sizes. `python -m benchmarks.tune` writes it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from pallas_kernels import dispatch

_FOLDER = Path(__file__).parent / "tuning"


def block(op: str, device_kind: str | None, default: Mapping[str, int]) -> dict[str, int]:
    """Block sizes for an implementation of an op: those of the tuning table, else the defaults.

    Args:
        op: key of the table: "<op>/<backend>".
        device_kind: in the form of `jax.Device.device_kind`; None: the device that is compiled for.
        default: every size that the implementation needs, with a value that is safe on any device. Other names in the
            table are ignored.
    """
    kind = dispatch.device_kind() if device_kind is None else device_kind
    found = {**_table(kind).get(op, {}), **_trying.get(op, {})}
    sizes = {name: int(found.get(name, size)) for name, size in default.items()}
    _asked[op] = sizes
    return sizes


def path(device_kind: str) -> Path:
    """Path of the tuning table of a device, which need not exist."""
    return _FOLDER / f"{'-'.join(device_kind.lower().split())}.json"


@contextlib.contextmanager
def trying(sizes: Mapping[str, Mapping[str, int]]) -> Iterator[dict[str, dict[str, int]]]:
    """Replaces the table's sizes by these within the context, for measurements. Yields the sizes that each op used.

    It affects functions traced within the context. A function that is already compiled keeps its sizes.
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
