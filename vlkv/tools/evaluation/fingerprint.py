"""Fingerprints of the files that a run depends on, so that it is not resumed with different files."""

import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from checkpoints_convert.sources import base_of
from vlkv.policies import Policy, own
from vlkv.tools.evaluation.records import Record

_END = 2**20  # bytes that are read at the beginning and at the end of a file


def of_file(file: Path) -> str:
    """SHA-256 of the content of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def of_model(folder: Path) -> dict[str, Any]:
    """SHA-256 over the name, the size, and the first and last MiB of each file of a checkpoint folder.

    For an adapter alone, also over the files of its base model.
    """
    return {"files": _of_places(dict.fromkeys((folder, base_of(folder))))}


def of_pictures(records: Iterable[Record]) -> str:
    """SHA-256, as in `of_model`, over the image and video files of all questions."""
    places = (place for record in records for place in (*record.images, *record.videos))
    return _of_places(place for place in places if isinstance(place, Path))


def of_code(plan: Iterable[Policy]) -> dict[str, str]:
    """Name of each class of a user in these policies -> SHA-256 of its file."""
    kinds = set().union(*map(own.classes, plan))
    return {kind.__qualname__: of_file(Path(inspect.getfile(kind))) for kind in kinds}


def _of_places(places: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in (path for path in files if path.is_file() and not path.name.startswith(".")):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(place)} {size} ".encode())
            with file.open("rb") as content:
                digest.update(content.read(_END))
                if size > _END:
                    content.seek(max(size - _END, _END))
                    digest.update(content.read())
    return digest.hexdigest()
