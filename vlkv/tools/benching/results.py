"""Results in a JSON file, which is written after every setting, so that an interrupted run can be resumed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from vlkv.errors import InputError
from vlkv.files import read_json, write_json
from vlkv.policies import Policy, text_of
from vlkv.tools.benching import machine
from vlkv.tools.benching.settings import Setting
from vlkv.tools.benching.subjects import Subject

Line = tuple[Subject, Setting, Policy]  # a cell of the grid
_SAME = ("processor", "cores", "device", "devices", "python", "jax")  # must be equal for all results of a file


class Results:
    """Rows of one machine. Every row contains its commit, because rows of one file may differ in it."""

    def __init__(self, path: Path | None, command: str) -> None:
        """Opens or creates the file; raises InputError for another kind of file, or one of another machine."""
        self.path = path
        self.content: dict[str, Any] = {"command": command, "machine": machine.describe(), "rows": []}
        if path is None:
            return
        if not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder to write the results into")
        held = read_json(path)
        if held is None:
            return
        if not isinstance(held.get("rows"), list) or not isinstance(held.get("machine"), dict):
            raise InputError(f"{path}: not a file with results of vlkv bench; give another --out")
        for name in _SAME:
            then, now = held["machine"].get(name), self.content["machine"][name]
            if then != now:
                difference = f"was measured with {name} {then}, but this machine has {now}"
                raise InputError(f"{path}: {difference}; give another --out")
        self.content["rows"] = held["rows"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order of measurement."""
        return self.content["rows"]

    def find(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The row of one cell of the grid; None if it has not been measured."""
        plain = json.loads(json.dumps(identity))
        return next((row for row in self.rows if row["cell"] == plain), None)

    def add(self, identity: dict[str, Any], result: dict[str, Any]) -> None:
        """Adds a row and writes the file."""
        self.rows.append({"cell": json.loads(json.dumps(identity)), "commit": machine.commit(), **result})
        if self.path is not None:
            write_json(self.path, self.content)


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
