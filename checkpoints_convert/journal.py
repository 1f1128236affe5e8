"""What a conversion has finished so far, so that one that was killed goes on where it stopped.

A shard counts as finished when the journal holds the checksums of its files; the journal is replaced in one step after
each of them. A later run keeps what the journal lists and what still has its checksum, and removes all else.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from checkpoints_convert.manifest import sha256, write_json
from vlkv.errors import InputError
from vlkv.files import read_json

JOURNAL = "vlkv_unfinished.json"


class Journal:
    """Of one folder that is being written."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        """Takes up what another run of the same `job` has left in the folder; of another job nothing stays."""
        self.folder, self.job = folder, job
        self.shards: dict[str, dict[str, Any]] = {}  # by name: the digests of its files, its bytes
        try:
            before = read_json(folder / JOURNAL) or {}
        except InputError:  # half-written
            before = {}
        if before.get("job") == job:
            self.shards = {name: shard for name, shard in before["shards"].items() if self._is_whole(shard["sha256"])}
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name not in self.shards:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._save()

    def finish(self, name: str, digests: dict[str, str], nbytes: int) -> None:
        """Writes down that a shard is whole."""
        self.shards[name] = {"sha256": digests, "bytes": nbytes}
        self._save()

    def close(self) -> None:
        """Removes the journal from the folder."""
        (self.folder / JOURNAL).unlink()

    def _is_whole(self, digests: dict[str, str]) -> bool:
        return all((self.folder / name).is_file() and sha256(self.folder / name) == d for name, d in digests.items())

    def _save(self) -> None:
        new = self.folder / f"{JOURNAL}.new"
        write_json(new, {"job": self.job, "shards": self.shards})
        new.replace(self.folder / JOURNAL)
