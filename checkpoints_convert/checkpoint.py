"""Opens a checkpoint folder and checks it against a table before weights are read.

Every error in a folder raises an InputError with the file or the key.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_convert import pickles
from checkpoints_convert.entry import HEAD, Entry, Table, make_entries
from vlkv.errors import InputError
from vlkv.files import read_json

INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float32}
_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The location of one tensor."""

    file: Path
    key: str  # as written in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as BF16
    begin: int  # offset of its first byte in the file

    @property
    def own_dtype(self) -> np.dtype:
        """The dtype in the file."""
        return np.dtype(np.float64 if self.dtype == "F64" else _DTYPES[self.dtype])

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first axis."""
        return math.prod(self.shape[1:]) * self.own_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checked folder: its table, and the tensor of every entry."""

    folder: Path
    table: Table
    entries: tuple[Entry, ...]
    tensors: dict[str, Tensor]  # by new name

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the embedding table, which usually is that of all tensors."""
        key = next(entry.key for entry in self.entries if entry.path == "decoder.embedding.weight")
        return np.dtype(_DTYPES[self.tensors[key].dtype])

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        return all(entry.path != HEAD for entry in self.entries)

    @property
    def settings(self) -> dict[str, Path]:
        """Files of tokenizer, templates and processor by name. The processor's may be in the folder of the tower."""
        files = {path.name: path for pattern in _SETTINGS for path in self.folder.glob(pattern)
                 if path.is_file() and not path.name.endswith(".index.json")}  # fmt: skip
        if self.table.names.tower is not None:
            beside = self.folder / self.table.names.tower[0] / "preprocessor_config.json"
            if beside.is_file() and "processor_config.json" not in files:
                files.setdefault(beside.name, beside)
        return dict(sorted(files.items()))

    def read(self, entry: Entry) -> np.ndarray:
        """One parameter: its tensor, or its part of a fused tensor."""
        array = self.read_tensor(entry.key)
        return array if entry.part is None else entry.part.of(array)

    def read_tensor(self, key: str) -> np.ndarray:
        """One whole tensor."""
        tensor = self.tensors[key]
        return next(self._rows(tensor, math.prod(tensor.shape[:1])))

    def slices(self, key: str, nbytes: int) -> Iterator[np.ndarray]:
        """One tensor in slices along its first axis, of at most `nbytes` bytes or one row each."""
        tensor = self.tensors[key]
        yield from self._rows(tensor, max(1, nbytes // max(1, tensor.row_bytes)))

    def _rows(self, tensor: Tensor, rows: int) -> Iterator[np.ndarray]:
        # Not memory-mapped, because mapped files count as memory of the process while anything refers to them.
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.begin)
                for first in range(0, length := math.prod(tensor.shape[:1]), rows):
                    count = min(rows, length - first)
                    data = np.fromfile(file, np.uint8, count * tensor.row_bytes).view(tensor.own_dtype)
                    yield data.reshape((count, *tensor.shape[1:])[: len(tensor.shape)])
        except (OSError, ValueError) as error:
            raise InputError(f"{tensor.file}: cannot read {tensor.key}: {error}") from None


def cast(array: np.ndarray, dtype: np.dtype | None, key: str) -> np.ndarray:
    """The array in another dtype; InputError if a finite value overflows."""
    if dtype is None or array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not np.isfinite(result.astype(np.float32)).all() and np.isfinite(array.astype(np.float32)).all():
        raise InputError(f"{key} has values beyond {dtype.name}: use bfloat16 or float32")
    return result


def require_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError if the file does not exist."""
    content = read_json(path)
    if content is None:
        raise InputError(f"{path}: no such file")
    return content


def open_checkpoint(folder: Path, table: Table, *, pickled: bool = False) -> Checkpoint:
    """Reads the headers and compares every tensor with the table.

    Args:
        folder: with the weights.
        table: of its family.
        pickled: whether weights pickled by torch are accepted if there are no safetensors.

    Raises:
        InputError: no weights, pickle weights that are not accepted or not safe, a damaged file, an index that points
            outside the folder, or keys that are unknown, missing, duplicate or of another shape.
    """
    found: dict[str, Tensor] = {}
    for file in _files(folder, pickled):
        for tensor in _headers(file, pickled):
            key = table.names.canonical(tensor.key)
            if key in found:
                raise InputError(f"{tensor.file}: {tensor.key} exists twice (also in {found[key].file.name})")
            found[key] = tensor
    found |= _tower_beside(folder, table, found, pickled)
    made = make_entries(table.names, table.shapes())
    entries = tuple(entry for entry in made if entry.path != HEAD or entry.key in found)
    _match(found, entries, table, folder)
    return Checkpoint(folder, table, entries, found)


def _tower_beside(folder: Path, table: Table, found: dict[str, Tensor], pickled: bool) -> dict[str, Tensor]:
    """The tensors of a tower that the checkpoint does not contain, from the tower's folder inside the checkpoint.

    Other folders are never read, because a config that we do not trust could name them.
    """
    if table.names.tower is None:
        return {}
    name, prefix = table.names.tower
    if any(key.startswith(prefix) for key in found):
        return {}  # the checkpoint contains the tower, which may have been trained further
    place = folder / name
    if not place.is_dir():
        raise InputError(f"{folder}: contains no vision tower: put the folder {name} (config.json and weights) of the "
                         "tower that config.json names into it")  # fmt: skip
    beside = [tensor for file in _files(place, pickled) for tensor in _headers(file, pickled)
              if tensor.key.startswith("vision_model.")]  # fmt: skip
    return {table.names.canonical(f"vision_tower.{tensor.key}"): tensor for tensor in beside}


def _match(found: dict[str, Tensor], entries: tuple[Entry, ...], table: Table, folder: Path) -> None:
    wanted = {entry.key: entry for entry in entries}
    for key, tensor in found.items():
        if key not in wanted:
            if not table.names.ignores(key):
                raise InputError(f"{tensor.file}: unknown key {tensor.key} for model_type {table.family}")
        elif tensor.shape != wanted[key].shape:
            raise InputError(f"{tensor.file}: {tensor.key} has shape {list(tensor.shape)}, "
                             f"config.json says {list(wanted[key].shape)}")  # fmt: skip
        elif tensor.dtype not in _DTYPES:
            raise InputError(
                f"{tensor.file}: {tensor.key} has dtype {tensor.dtype}: quantised weights are not supported"
            )
    missing = [key for key in wanted if key not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder}: missing key {missing[0]}{more}")


def _files(folder: Path, pickled: bool) -> list[Path]:
    """The files of weights: safetensors if there are any, else pickles."""
    for index, single in ((INDEX, "model.safetensors"), (_PICKLE_INDEX, "pytorch_model.bin")):
        if (pickled or index == INDEX) and (found := _indexed(folder / index, folder / single)):
            return found
    if any(next(folder.glob(pattern), None) for pattern in _PICKLE):
        remedy = (f"name it pytorch_model.bin, or write {_PICKLE_INDEX}" if pickled else
                  "`vlkv convert` reads them safely")  # fmt: skip
        raise InputError(f"{folder}: only pickle weights (.bin, .pt), which can run code when opened: {remedy}")
    raise InputError(f"{folder}: no model.safetensors and no {INDEX}")


def _indexed(index: Path, single: Path) -> list[Path]:
    """The files that an index names, or the single file; empty if neither exists."""
    if not index.is_file():
        return [single] if single.is_file() else []
    names = require_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{index}: no weight_map from keys to file names")
    files = [index.parent / name for name in sorted(set(names.values()))]
    for name, file in zip(sorted(set(names.values())), files, strict=True):
        # Only plain names, because an index that we do not trust must not make us read outside its folder.
        if name != Path(name).name or name in ("", ".", ".."):
            raise InputError(f"{index}: points outside the folder: {name!r}")
        if not file.is_file():
            raise InputError(f"{index}: names {name}, which is not in the folder")
    return files


def _headers(file: Path, pickled: bool) -> list[Tensor]:
    if pickled and file.suffix != ".safetensors":
        return [Tensor(file, *header) for header in pickles.headers(file)]
    try:
        with safe_open(file, framework="np") as opened:  # checks all offsets
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
            found = {key: (tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}
        with file.open("rb") as plain:
            length = int.from_bytes(plain.read(8), "little")
            header = json.loads(plain.read(length))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: truncated or corrupt safetensors ({error})") from None
    return [Tensor(file, key, *found[key], 8 + length + header[key]["data_offsets"][0]) for key in found]
