"""The manifest of a converted folder: its source, and the checksum of every file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from checkpoints_convert.sources import MANIFEST
from vlkv.errors import InputError
from vlkv.files import require_json


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
