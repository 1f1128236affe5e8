"""A file with the answers of a run so far, so that an interrupted run resumes where it stopped.

The first line describes the run; every other line is one answer. Lines are appended and synced. An incomplete last line
is dropped when the journal is opened again. A run with other settings is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from vlkv.errors import InputError

NAME = "journal.jsonl"


class Entry(TypedDict):
    """One answer. `row`, `turn` and `policy` are indices, which start at 0."""

    row: int
    turn: int
    policy: int
    answer: str
    tokens: int  # number of generated tokens, including the stop token
    seconds: float  # decoding time of the batch, divided by its rows
    bytes: int  # allocated bytes of the batch's cache, divided by its rows
    begun: int  # tokens that the full cache gave before it was compressed (`compose(answer=)`)
    bytes_before: int  # likewise, bytes of this full cache; 0 if there was none
    log_probability: float  # of the reference; 0 if it was not requested
    reference: int  # number of tokens of the reference
    drawn: list[str]  # two answers drawn at the temperature of `Settings`; empty except for the full cache


class RunFile:
    """JSON lines: the settings of a run, then a line for each result, synced at once. A killed run resumes from it."""

    def __init__(self, path: Path, run: dict[str, Any], key: Sequence[str], fields: Iterable[str] = ()) -> None:
        """Starts the file of a run, or reads that of an interrupted run with the same settings.

        An incomplete last line is dropped.

        Args:
            path: the file.
            run: the settings.
            key: the fields that identify a result, in the order in which `entries` has them.
            fields: further fields that every result must have.

        Raises:
            InputError: the file is damaged or belongs to a run with other settings, which the message names.
        """
        self.path, self.key, run = path, tuple(key), json.loads(json.dumps(run))
        self.entries: dict[Any, Any] = {}  # the results by their key
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        first, *results = whole.splitlines() or [b""]
        if first:
            self._check_same_run(self._parse(first, 1, {"run"})["run"], run)
        for number, line in enumerate(results, start=2):
            result = self._parse(line, number, {*key, *fields})
            self.entries.setdefault(self._key(result), result)
        self.resumed = len(self.entries)  # results of the interrupted run
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")
        self.file.truncate(len(whole))
        if not first:
            self._write([{"run": run}])

    def append(self, results: Iterable[Any]) -> None:
        """Appends the results that are not in the file yet."""
        new = [result for result in results if self._key(result) not in self.entries]
        self.entries |= {self._key(result): result for result in new}
        if new:
            self._write(new)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _key(self, result: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(result[name] for name in self.key)

    def _write(self, lines: Iterable[Any]) -> None:
        self.file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.file.flush()
        os.fsync(self.file.fileno())

    def _parse(self, line: bytes, number: int, fields: set[str]) -> dict[str, Any]:
        """The object of a line with these fields; InputError if the line is something else."""
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict) or not fields <= parsed.keys():
            raise InputError(
                f"{self.path}, line {number}: damaged; delete the file to start over, or give another --out"
            )
        return parsed

    def _check_same_run(self, before: Any, run: dict[str, Any]) -> None:
        before = before if isinstance(before, dict) else {}
        changed = [name for name in {**before, **run} if before.get(name) != run.get(name)]
        if changed:
            raise InputError(
                f"{self.path}: belongs to a run that differs in {', '.join(changed)}; "
                "resume it with the same settings, or give another --out"
            )


class Journal(RunFile):
    """The answers in one output folder: `entries` are by row, turn and policy."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """Starts the journal of a run, or reads that of an interrupted run. Raises InputError as `RunFile`."""
        super().__init__(folder / NAME, run, key=("row", "turn", "policy"), fields=Entry.__annotations__)
