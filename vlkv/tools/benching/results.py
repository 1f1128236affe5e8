"""Results in a JSON file, which is written after every setting, so that an interrupted run can be resumed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from vlkv.errors import InputError
from vlkv.policies import Policy, text_of
from vlkv.tools.benching import machine
from vlkv.tools.benching.settings import Setting, Subject
from vlkv.tools.evaluation.journal import Store

Line = tuple[Subject, Setting, Policy]  # a cell of the grid
_SAME = ("processor", "cores", "device", "devices", "python", "jax")  # must be equal for all results of a file


class Results(Store):
    """Rows of one machine. Every row contains its commit, because rows of one file may differ in it."""

    def __init__(self, path: Path | None, command: str) -> None:
        """Opens or creates the file; raises InputError for another kind of file, or one of another machine."""
        super().__init__(path, {"command": command, "machine": machine.describe()}, key=("cell",))

    def check(self, before: Any) -> None:
        """Raises InputError for a file of another machine."""
        if not isinstance(before.get("machine"), dict):
            raise InputError(f"{self.path}: not a file with results of vlkv bench; give another --out")
        for name in _SAME:
            then, now = before["machine"].get(name), self.run["machine"][name]
            if then != now:
                difference = f"was measured with {name} {then}, but this machine has {now}"
                raise InputError(f"{self.path}: {difference}; give another --out")

    def find(self, cell: dict[str, Any]) -> dict[str, Any] | None:
        """The row of one cell of the grid; None if it has not been measured."""
        plain = json.loads(json.dumps(cell))
        return next((row for row in self.rows if row["cell"] == plain), None)

    def add(self, cell: dict[str, Any], measured: dict[str, Any]) -> None:
        """Adds a row, or replaces that of its cell, and writes the file."""
        row = {"cell": json.loads(json.dumps(cell)), "commit": machine.commit(), **measured}
        self.entries.pop(self.key_of(row), None)
        self.append([row])


def identity(line: Line, *, together: bool = False) -> dict[str, Any]:
    """The properties that identify a cell of the grid. `together`: measured alternately with other settings."""
    subject, setting, policy = line
    place = {} if subject.mesh is None else {"mesh": dict(subject.mesh.shape), "processes": jax.process_count()}
    return {
        "model": subject.name,
        "dtype": subject.dtype.name,
        **dataclasses.asdict(setting),
        "policy": text_of(policy),
        **place,
        **({"together": True} if together else {}),
    }
