"""Measured series: a number, or a list of numbers, for every sample. Files of JSON, written after each batch."""

import functools
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vlkv.files import plain, replacing
from vlkv.tools.benching import machine

CLAIMS = Path(__file__).with_name("claims.toml")
FOLDER = Path(__file__).parents[1] / "results" / "findings"


@functools.cache
def declared() -> dict[str, Any]:
    """The content of claims.toml."""
    return tomllib.loads(CLAIMS.read_text())


class Series:
    """The series of one file, by the name of their experiment and their own."""

    def __init__(self, path: Path, seconds: float = float("inf")) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"series": {}}

    def holds(self, name: str, start: int) -> bool:
        """Whether the series has the batch that begins with this sample."""
        return len(self.content["series"].get(name, ())) > start

    def todo(self, name: str, count: int, batch: int) -> Iterator[int]:
        """The first sample of each batch that is not measured yet; `name` is a series that every batch adds to.

        After `seconds`, no further batch begins.
        """
        done = len(self.content["series"].get(name, ()))
        for start in range(done, count, batch):
            if time.monotonic() > self.end:
                return
            print(f"{self.path.name}: {start} of {count}", flush=True)
            yield start

    def add(self, experiment: str, found: Mapping[str, Any], start: int) -> None:
        """Adds a batch and writes the file."""
        for name, values in found.items():
            held = self.content["series"].setdefault(f"{experiment}/{name}", [])
            held[start:] = plain(np.round(np.asarray(values, np.float64), 4))
        self.content["machine"] = machine.describe()
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(held)}" for name, held in self.content["series"].items())
        with replacing(self.path) as partial:
            partial.write_text(f'{{"machine": {json.dumps(self.content["machine"])},\n"series": {{\n{lines}\n}}}}\n')
