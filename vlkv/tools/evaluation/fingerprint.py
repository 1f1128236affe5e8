"""Fingerprints of the files that a run depends on, so that it is not resumed with different files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from checkpoints_convert.sources import base_of

_END = 2**20  # bytes that are read at the beginning and at the end of a file


def of_file(file: Path) -> str:
    """SHA-256 of the content of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def of_model(folder: Path) -> dict[str, Any]:
    """SHA-256 over the name, the size, and the first and last MiB of each file of a checkpoint folder.

    For an adapter alone, also over the files of its base model.
    """
    digest = hashlib.sha256()
    for place in dict.fromkeys((folder, base_of(folder))):
        for file in sorted(path for path in place.rglob("*") if path.is_file() and not path.name.startswith(".")):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(place)} {size} ".encode())
            with file.open("rb") as content:
                digest.update(content.read(_END))
                if size > _END:
                    content.seek(max(size - _END, _END))
                    digest.update(content.read())
    return {"files": digest.hexdigest()}
