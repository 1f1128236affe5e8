"""A file with the answers of a run so far, so that an interrupted run resumes where it stopped.

The first line describes the run; every other line is one answer. Lines are appended and synced. An incomplete last line
is dropped when the journal is opened again. A run with other settings is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
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

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        """Starts the file of a run, or reads that of an interrupted run with the same settings.

        An incomplete last line is dropped.

        Raises:
            InputError: the file is damaged or belongs to a run with other settings, which the message names.
        """
        self.path, run = path, json.loads(json.dumps(run))
        content = path.read_bytes() if path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        lines = [self._parse(line, number) for number, line in enumerate(whole.splitlines(), start=1)]
        if lines:
            self._check_same_run(lines[0].get("run"), run)
        self.results = lines[1:]  # those of the interrupted run
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")
        self.file.truncate(len(whole))
        if not lines:
            self.write([{"run": run}])

    def write(self, lines: Iterable[Any]) -> None:
        """Appends lines."""
        self.file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def damaged(self, result: int) -> InputError:
        """The error for a line that is no result; `result` is its index in `results`."""
        return self._damaged(result + 2)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            parsed = json.loads(line)
        except ValueError:
            raise self._damaged(number) from None
        if not isinstance(parsed, dict):
            raise self._damaged(number)
        return parsed

    def _check_same_run(self, before: Any, run: dict[str, Any]) -> None:
        if not isinstance(before, dict):
            raise self._damaged(1)
        changed = [name for name in {**before, **run} if before.get(name) != run.get(name)]
        if changed:
            raise InputError(
                f"{self.path}: belongs to a run that differs in {', '.join(changed)}; "
                "resume it with the same settings, or give another --out"
            )

    def _damaged(self, number: int) -> InputError:
        return InputError(f"{self.path}, line {number}: damaged; delete the file to start over, or give another --out")


class Journal:
    """The answers in one output folder."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """Starts the journal of a run, or reads that of an interrupted run. Raises InputError as `RunFile`."""
        self.file = RunFile(folder / NAME, run)
        self.entries: dict[tuple[int, int, int], Entry] = {}
        for number, entry in enumerate(self.file.results):
            if set(entry) != set(Entry.__annotations__):
                raise self.file.damaged(number)
            self._add(entry)  # type: ignore[arg-type]  # it has the keys of Entry
        self.resumed = len(self.entries)

    def append(self, entries: Iterable[Entry]) -> None:
        """Appends the entries that are not in the journal yet."""
        new = [entry for entry in entries if (entry["row"], entry["turn"], entry["policy"]) not in self.entries]
        for entry in new:
            self._add(entry)
        if new:
            self.file.write(new)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _add(self, entry: Entry) -> None:
        self.entries.setdefault((entry["row"], entry["turn"], entry["policy"]), entry)
