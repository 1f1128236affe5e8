"""The results file of `benchmarks.real quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlkv.tools.evaluation.journal import RunFile

_KEY = ("protocol", "length", "task", "number", "engine", "method")


class Rows:
    """The answers so far, by protocol, length, task, number, engine and method."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        """Starts the file of a run, or reads that of an interrupted one. Raises InputError as `RunFile`."""
        self.file = RunFile(path, run)
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for number, row in enumerate(self.file.results):
            if not set(_KEY) <= set(row):
                raise self.file.damaged(number)
            self.rows[tuple(row[name] for name in _KEY)] = row

    def find(self, *key: Any) -> dict[str, Any] | None:
        """The row of a key in the order of the class' docstring."""
        return self.rows.get(key)

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row."""
        self.rows[tuple(row[name] for name in _KEY)] = row
        self.file.write([row])

    def close(self) -> None:
        """Closes the file."""
        self.file.close()
