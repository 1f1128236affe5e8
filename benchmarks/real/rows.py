"""The results file: JSON lines, of which each is synced at once, so that a killed run resumes where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vlkv.errors import InputError

_KEY = ("protocol", "length", "task", "number", "engine", "method")


class Rows:
    """The answers so far, by protocol, length, task, number, engine and method."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        """Starts the file of a run, or reads that of an interrupted one. An incomplete last line is dropped.

        Raises:
            InputError: the file is damaged, or belongs to a run that differs in what `run` says.
        """
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            before = lines[0]["run"] if lines else run
            self.rows = {tuple(line[name] for name in _KEY): line for line in lines[1:]}
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}: not a results file of this command; give another --out") from None
        changed = [name for name in {**before, **run} if before.get(name) != run.get(name)]
        if changed:
            raise InputError(f"{path}: belongs to a run that differs in {', '.join(changed)}; give another --out")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")
        self.file.truncate(len(whole))
        if not lines:
            self._write({"run": run})

    def find(self, *key: Any) -> dict[str, Any] | None:
        """The row of a key in the order of the class' docstring."""
        return self.rows.get(key)

    def add(self, row: dict[str, Any]) -> None:
        """Appends a row."""
        self.rows[tuple(row[name] for name in _KEY)] = row
        self._write(row)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
