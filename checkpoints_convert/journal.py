"""The journal of finished shards, with which an interrupted conversion resumes where it stopped.

A shard is finished when the journal contains the checksums of its files. The journal is replaced atomically after each
shard. A later run keeps the shards in the journal whose checksums are right, and removes all other files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from checkpoints_convert.manifest import sha256, size_text
from vlkv.errors import InputError
from vlkv.files import read_json, write_json

JOURNAL = "vlkv_unfinished.json"


class Journal:
    """The journal of one folder."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        """Keeps the shards that an earlier run of the same `job` has finished, and removes all other files."""
        self.folder, self.job = folder, job
        self.shards: dict[str, dict[str, Any]] = {}  # name -> digests of its files, and its bytes
        try:
            before = read_json(folder / JOURNAL) or {}
        except InputError:  # an incomplete file
            before = {}
        self.before = ""  # what became of an earlier run, if there was one
        if before.get("job") == job:
            self.shards = {name: shard for name, shard in before["shards"].items() if self._is_whole(shard["sha256"])}
            count, nbytes = len(self.shards), sum(shard["bytes"] for shard in self.shards.values())
            damaged = len(before["shards"]) - count
            self.before = f"resumes, {count} finished shards ({size_text(nbytes)}) are kept"
            self.before += f"; damaged and written again: {damaged}" if damaged else ""
        elif before:
            self.before = "begins again, because the interrupted run had another source or other options"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name not in self.shards:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._save()

    def finish(self, name: str, digests: dict[str, str], nbytes: int) -> None:
        """Records that a shard is complete."""
        self.shards[name] = {"sha256": digests, "bytes": nbytes}
        self._save()

    def close(self) -> None:
        """Removes the journal from the folder."""
        (self.folder / JOURNAL).unlink()

    def _is_whole(self, digests: dict[str, str]) -> bool:
        return all((self.folder / name).is_file() and sha256(self.folder / name) == d for name, d in digests.items())

    def _save(self) -> None:
        write_json(self.folder / JOURNAL, {"job": self.job, "shards": self.shards})
