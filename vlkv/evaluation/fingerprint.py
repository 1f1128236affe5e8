"""Fingerprints of the files that a run depends on, so that it is not resumed with other ones."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_END = 2**20  # bytes read at either end of a large file


def of_file(file: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def of_model(folder: Path) -> dict[str, Any]:
    """Fingerprint of a checkpoint folder: the size and the first and last megabyte of each file."""
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        size = file.stat().st_size
        found.update(f"{file.relative_to(folder)} {size} ".encode())
        with file.open("rb") as content:
            found.update(content.read(_END))
            if size > _END:
                content.seek(max(size - _END, _END))
                found.update(content.read())
    return {"files": found.hexdigest()}
