"""The store of results: each is written at once, so that a killed run resumes where it stopped."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from vlkv.errors import InputError
from vlkv.files import read_json, write_json

NAME = "journal.jsonl"


class _Optional(TypedDict, total=False):
    """What not every entry has."""

    ids: list[int]  # the generated tokens
    prompt: int  # number of tokens of the prompt
    kept: float  # entries of the prompt, mean over layers and heads
    margins: list[float] | None  # by how much the logit of each token exceeds the second highest
    prefill_seconds: float
    compress_seconds: float


class Entry(_Optional):
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


class Store:
    """The results of a run in a file, by their keys.

    A file .jsonl has the settings of the run in its first line and a result in each other line, which is appended and
    synced. Any other file is one JSON object, the settings and the results as "rows", and is replaced each time.
    """

    def __init__(
        self, path: Path | None, run: Mapping[str, Any], key: Sequence[str], fields: Iterable[str] = ()
    ) -> None:
        """Starts the file of a run, or reads that of an interrupted run with the same settings `run`.

        Args:
            path: the file; None: nothing is written.
            run: the settings.
            key: the fields that identify a result; their values are the keys of `entries`.
            fields: further fields that every result must have.

        Raises:
            InputError: the file is damaged or belongs to a run with other settings, which the message names.
        """
        self.path, self.key, self.fields = path, tuple(key), {*key, *fields}
        self.run: dict[str, Any] = json.loads(json.dumps(run))
        self.entries: dict[Any, Any] = {}
        self.file: BinaryIO | None = None
        if path is not None:
            results = self._read_lines(path) if path.suffix == ".jsonl" else self._read_object(path)
            for result in results:
                self.entries.setdefault(self.key_of(result), result)
        self.resumed = len(self.entries)  # results of the interrupted run

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All results, in the order in which they were added."""
        return list(self.entries.values())

    @property
    def content(self) -> dict[str, Any]:
        """The settings and all results."""
        return {**self.run, "rows": self.rows}

    def key_of(self, result: Mapping[str, Any]) -> tuple[Any, ...]:
        """The key of a result."""
        values = (result[name] for name in self.key)
        return tuple(json.dumps(value, sort_keys=True) if isinstance(value, dict) else value for value in values)

    def append(self, results: Iterable[Any]) -> None:
        """Adds the results that are not in the store yet."""
        new = [result for result in results if self.key_of(result) not in self.entries]
        self.entries |= {self.key_of(result): result for result in new}
        if new:
            self._write(new)

    def close(self) -> None:
        """Closes the file."""
        if self.file is not None:
            self.file.close()

    def check(self, before: Any) -> None:
        """Raises InputError if the file belongs to another run, with the settings `before`."""
        before = before if isinstance(before, dict) else {}
        changed = [name for name in {**before, **self.run} if before.get(name) != self.run.get(name)]
        if changed:
            raise InputError(
                f"{self.path}: belongs to a run that differs in {', '.join(changed)}; "
                "resume it with the same settings, or give another --out"
            )

    def _read_lines(self, path: Path) -> list[dict[str, Any]]:
        """The results of a file of JSON lines, which is then open for others; an incomplete last line is dropped."""
        content = path.read_bytes() if path.is_file() else b""
        complete = content[: content.rfind(b"\n") + 1]
        first, *lines = complete.splitlines() or [b""]
        if first:
            self.check(self._parse(first, 1, {"run"})["run"])
        results = [self._parse(line, number, self.fields) for number, line in enumerate(lines, start=2)]
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("ab")
        self.file.truncate(len(complete))
        if not first:
            self._write([{"run": self.run}])
        return results

    def _read_object(self, path: Path) -> list[dict[str, Any]]:
        if not path.parent.is_dir():
            raise InputError(f"{path.parent}: no such folder to write the results into")
        before = read_json(path)
        if before is None:
            return []
        rows = before.pop("rows", None)
        self.check(before)
        if not isinstance(rows, list):
            raise InputError(f"{path}: not a file with results; give another --out")
        return rows

    def _write(self, new: Iterable[Any]) -> None:
        if self.file is not None:
            self.file.write(b"".join(json.dumps(result).encode() + b"\n" for result in new))
            self.file.flush()
            os.fsync(self.file.fileno())
        elif self.path is not None:
            write_json(self.path, self.content)

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


class Journal(Store):
    """The answers in one output folder: `entries` are by row, turn and policy."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        """Starts the journal of a run, or reads that of an interrupted run. Raises InputError as `Store`."""
        super().__init__(folder / NAME, run, key=("row", "turn", "policy"), fields=Entry.__required_keys__)
