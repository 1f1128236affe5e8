"""What has been measured, in a JSON file that is written after every setting: a run that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlkv.benching import machine
from vlkv.benching.settings import Setting
from vlkv.errors import InputError
from vlkv.files import read_json, write_json
from vlkv.policies import Policy

_SAME = ("processor", "cores", "device", "devices", "python", "jax")  # or figures must not stand in one file


class Results:
    """Rows of one machine. The commit stands in every row, since a file may outlive it."""

    def __init__(self, path: Path | None, command: str) -> None:
        """Raises InputError for a file that is not ours, or of another machine."""
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
            raise InputError(f"{path}: holds something else than results of vlkv bench; give another --out")
        for name in _SAME:
            then, now = held["machine"].get(name), self.content["machine"][name]
            if then != now:
                raise InputError(f"{path}: was measured with {name} {then}, here it is {now}; give another --out")
        self.content["rows"] = held["rows"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All of them, in the order in which they were measured."""
        return self.content["rows"]

    def find(self, identity: dict[str, Any]) -> dict[str, Any] | None:
        """The row of one cell of the grid, if it is there."""
        plain = json.loads(json.dumps(identity))
        return next((row for row in self.rows if row["cell"] == plain), None)

    def add(self, identity: dict[str, Any], found: dict[str, Any]) -> None:
        """One more row; the file is replaced whole."""
        self.rows.append({"cell": json.loads(json.dumps(identity)), "commit": machine.commit(), **found})
        if self.path is not None:
            write_json(self.path, self.content)


def identity(subject: str, dtype: str, setting: Setting, policy: Policy) -> dict[str, Any]:
    """What makes a cell of the grid the same cell."""
    return {
        "model": subject, "dtype": dtype, "batch": setting.batch, "prompt": setting.prompt, "text": setting.text,
        "new": setting.new, "policy": type(policy).__name__, "options": policy.options(),
    }  # fmt: skip


def missing(results: Results, subject: str, dtype: str, setting: Setting, policies: Sequence[Policy]) -> list[Policy]:
    """Contestants of a setting that no row is there of."""
    return [p for p in policies if results.find(identity(subject, dtype, setting, p)) is None]
