"""What a conversion writes about itself: a journal while it runs, and at the end a manifest with checksums.

With the journal, an interrupted conversion resumes where it stopped. A shard is finished when the journal contains the
checksums of its files. The journal is replaced atomically after each shard. A later run keeps the shards in the journal
whose checksums are right, and removes all other files.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from checkpoints_convert.sources import MANIFEST
from vlkv.errors import InputError
from vlkv.files import read_json, require_json, write_json

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


def verify(folder: Path) -> None:
    """Compares every file of a converted folder with its manifest; InputError names the first that differs."""
    digests = require_json(folder / MANIFEST).get("sha256")
    if not isinstance(digests, dict) or "config.json" not in digests:
        raise InputError(f"{folder / MANIFEST}: contains no checksums: convert again")
    for name, digest in digests.items():
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not (folder / name).is_file():
            raise InputError(f"{folder / name}: missing, but listed in the manifest")
        if sha256(folder / name) != digest:
            raise InputError(f"{folder / name}: checksum differs from the manifest: convert again")


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_below(path: Path) -> dict[str, str]:
    """SHA-256 of one file, or of every file in a folder, by names relative to the parent of `path`."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path.parent).as_posix(): sha256(file) for file in files}


def size_text(nbytes: int) -> str:
    """A number of bytes for a reader."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
