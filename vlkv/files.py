"""Reads small text files, with errors that name the file, and writes files atomically. Does not import jax."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlkv.errors import InputError

DATA = Path(__file__).parent / "data"  # files of the package


def class_defaults(family: str) -> Any:
    """Defaults of the classes in transformers that a family's files are read like, by the name of the class or part."""
    return json.loads((DATA / "defaults" / f"{family}.json").read_text(encoding="utf-8"))


def read_text(path: Path) -> str | None:
    """The file's text, or None if there is no such file.

    Raises:
        InputError: the file is not readable text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file; copy it again from the checkpoint's source") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file, or None if there is no such file.

    Raises:
        InputError: the file does not contain a JSON object.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not valid JSON; copy it again from the checkpoint's source") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: contains a JSON {type(content).__name__}, expected an object")
    return content


def require_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError if the file does not exist."""
    content = read_json(path)
    if content is None:
        raise InputError(f"{path}: no such file")
    return content


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder. It replaces `path` when the block ends without an error.

    Raises:
        InputError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder to write {path.name} into")
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new, empty folder next to `folder`. It replaces `folder` when the block ends without an error.

    If a process is killed between the two renames, `folder` is restored by the next call.
    """
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, content: Any) -> None:
    """Writes the content as JSON. If the process is killed, the old file is left unchanged."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def plain(x: Any) -> Any:
    """Converts to JSON types: arrays become lists; NaN and infinities, which JSON does not have, become null."""
    if isinstance(x, Mapping):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    if hasattr(x, "tolist"):
        return plain(x.tolist())
    return None if isinstance(x, float) and not math.isfinite(x) else x


def one_line(error: BaseException) -> str:
    """An exception's message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
