"""Opens a checkpoint folder and checks it against a table before weights are read.

Every error in a folder raises an InputError with the file or the key.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert import adapters, tensors
from checkpoints_convert.adapters import Adapter
from checkpoints_convert.entry import HEAD, Entry, Table, make_entries
from checkpoints_convert.sources import base_of, settings, weight_files
from checkpoints_convert.tensors import DTYPES, Tensor
from vlkv.errors import InputError

_EMBEDDING = "decoder.embedding.weight"
SLICE_BYTES = 2**24  # tensors are read and written in slices, so memory does not depend on their size


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checked folder: its table, and the tensor of every entry."""

    folder: Path  # that of the checkpoint, or of an adapter alone
    base: Path  # that of the weights
    table: Table
    entries: tuple[Entry, ...]  # of all parameters
    tensors: Mapping[str, Tensor]  # by new name
    adapter: Adapter | None = None  # its changes are applied when tensors are read

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the embedding table, which usually is that of all tensors."""
        return self.stored_dtype(_EMBEDDING)

    def stored_dtype(self, path: str) -> np.dtype:
        """The dtype of a parameter; float32 for float64, which jax does not use."""
        dtype = self.tensors[self.by_path[path][0].key].own_dtype
        return np.dtype(np.float32) if dtype.itemsize > 4 else dtype

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table."""
        return all(entry.path != HEAD for entry in self.entries)

    @property
    def settings(self) -> dict[str, Path]:
        """Files of tokenizer, templates and processor by name. The processor's may be in the folder of the tower."""
        available = settings(self.folder)
        files = {name: path for name, path in available.items() if "/" not in name or name.endswith(".jinja")}
        if self.table.names.tower is not None:
            of_tower = available.get(f"{self.table.names.tower[0]}/preprocessor_config.json")
            if of_tower is not None and "processor_config.json" not in files:
                files.setdefault(of_tower.name, of_tower)
        return dict(sorted(files.items()))

    @functools.cached_property
    def by_path(self) -> Mapping[str, tuple[Entry, ...]]:
        """The entries of each parameter."""
        grouped: dict[str, list[Entry]] = {}
        for entry in self.entries:
            grouped.setdefault(entry.path, []).append(entry)
        return {path: tuple(entries) for path, entries in grouped.items()}

    def read(self, path: str, dtype: np.dtype) -> np.ndarray:
        """One parameter: its tensor, its part of a fused tensor, or a stack of tensors."""
        entries = self.by_path[path]
        parts = (self._read(entry, dtype) for entry in entries)
        first = next(parts)
        if not entries[0].stacked:
            return first
        stack = np.empty((len(entries), *first.shape), dtype)
        for i, part in enumerate(itertools.chain([first], parts)):
            stack[i] = part
        return stack

    def _read(self, entry: Entry, dtype: np.dtype) -> np.ndarray:
        array = self.read_tensor(entry.key)
        return tensors.cast(array if entry.part is None else entry.part.of(array), dtype, entry.key)

    def read_tensor(self, key: str) -> np.ndarray:
        """One whole tensor."""
        tensor = self.tensors[key]
        if self.adapter is None or key not in self.adapter.updates:
            return tensors.read(tensor)
        result, first = np.empty(tensor.shape, tensor.own_dtype), 0
        for part in self.slices(key):  # so that only a slice is in float32
            result[first : first + len(part)] = part
            first += len(part)
        return result

    def slices(self, key: str) -> Iterator[np.ndarray]:
        """One tensor in slices along its first axis, of at most `SLICE_BYTES` bytes or one row each."""
        tensor, first = self.tensors[key], 0
        updates = () if self.adapter is None else self.adapter.updates.get(key, ())
        factors = [update.read() for update in updates]
        for part in tensors.read_rows(tensor, max(1, SLICE_BYTES // max(1, tensor.row_bytes))):
            yield adapters.applied(part, first, factors, key) if factors else part
            first += math.prod(part.shape[:1])

    def write_safetensors(
        self, keys: list[str], file: Path, dtype: np.dtype | None, done: Callable[[], Any]
    ) -> tuple[str, int]:
        """Writes some tensors into one file, which is overwritten; returns its SHA-256, and the bytes of its tensors.

        The format: the length of a JSON header (8 bytes, little endian), the header, the bytes of the tensors without
        gaps. `dtype` is that of all tensors; None: that of each. `done` is called after every tensor.
        """
        kinds = {key: dtype or self.tensors[key].own_dtype for key in keys}
        # Wide types first, so that the offset of every tensor is a multiple of its item size.
        order = sorted(keys, key=lambda key: -kinds[key].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key in order:
            shape = self.tensors[key].shape
            begin, end = end, end + math.prod(shape) * kinds[key].itemsize
            name = tensors.NAMES[kinds[key].name]
            header[key] = {"dtype": name, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256()
        with file.open("wb") as out:

            def put(part: bytes | memoryview) -> None:
                out.write(part)
                digest.update(part)

            put(len(text).to_bytes(8, "little") + text)
            for key in order:
                for part in self.slices(key):
                    written = np.ascontiguousarray(tensors.cast(part, kinds[key], key))
                    put(written.reshape(-1).view(np.uint8).data)
                done()
        return digest.hexdigest(), end


def open_checkpoint(folder: Path, table: Table, *, pickled: bool = False) -> Checkpoint:
    """Reads the headers and compares every tensor with the table.

    Args:
        folder: with the weights, an adapter, or both.
        table: of its family.
        pickled: whether weights pickled by torch are accepted if there are no safetensors.

    Raises:
        InputError: no weights, pickle weights that are not accepted or not safe, a damaged file, an index that points
            outside the folder, keys that are unknown, missing, duplicate or of another shape, or an adapter that cannot
            be applied.
    """
    present: dict[str, Tensor] = {}
    base = base_of(folder)
    for file in weight_files(base, pickled):
        for tensor in tensors.headers(file, pickled):
            key = table.names.canonical(tensor.key)
            if key in present:
                raise InputError(f"{tensor.file}: {tensor.key} exists twice (also in {present[key].file.name})")
            present[key] = tensor
    present |= _tower_beside(folder, base, table, present, pickled)
    adapter = adapters.open_adapter(folder, table.names.canonical, pickled=pickled)
    # Of the possible entries, that of the head is removed below if the model is tied and the checkpoint has no head.
    possible = make_entries(table.names, table.shapes(), {key: tensor.shape for key, tensor in present.items()})
    embedding, head = (next(entry.key for entry in possible if entry.path == path) for path in (_EMBEDDING, HEAD))
    if table.tied:
        present = _tie(present, embedding, head, adapter)
    if adapter is not None:
        for key, tensor in adapter.replaced.items():
            present[key] = dataclasses.replace(tensor, read_as=present[key].dtype if key in present else None)
    entries = tuple(entry for entry in possible if entry.path != HEAD or entry.key in present or not table.tied)
    if head not in present and not table.tied and embedding in present:
        remedy = "if it is the embedding table, set tie_word_embeddings in config.json"
        raise InputError(f"{base}: missing key {head}, the output head; {remedy}")
    _match(present, entries, table, base)
    if adapter is not None:
        _match_updates(adapter, entries, table)
    return Checkpoint(folder, base, table, entries, present, adapter)


def _tie(present: dict[str, Tensor], embedding: str, head: str, adapter: Adapter | None) -> dict[str, Tensor]:
    """The tensors of a model whose config says that the head is the embedding table, as transformers ties them.

    If the checkpoint has only a head, it is the embedding table too. If an adapter changes one of them, the other one
    stays as it is, so they are no longer the same.
    """
    present = dict(present)
    if embedding not in present and head in present:
        present[embedding] = present.pop(head)
    changed = set() if adapter is None else {embedding, head} & {*adapter.replaced, *adapter.updates}
    together = adapter is not None and adapter.config.get("ensure_weight_tying") and changed == {embedding}
    if changed and not together and head not in present and embedding in present:
        present[head] = present[embedding]
    return present


def _tower_beside(folder: Path, base: Path, table: Table, known: dict[str, Tensor], pickled: bool) -> dict[str, Tensor]:
    """The tensors of a tower that the checkpoint does not contain, from the tower's folder inside the checkpoint.

    Other folders are never read, because a config that we do not trust could name them.
    """
    if table.names.tower is None:
        return {}
    name, prefix = table.names.tower
    if any(key.startswith(prefix) for key in known):
        return {}  # the checkpoint contains the tower, which may have been trained further
    tower_folder = next((parent / name for parent in (folder, base) if (parent / name).is_dir()), None)
    if tower_folder is None:
        remedy = f"put the folder {name} (config.json and weights) of the tower that config.json names into it"
        raise InputError(f"{folder}: contains no vision tower: {remedy}")
    available = [tensor for file in weight_files(tower_folder, pickled) for tensor in tensors.headers(file, pickled)]
    # A folder of CLIP also has its text model.
    of_tower = [tensor for tensor in available if tensor.key.startswith("vision_model.")]
    return {table.names.canonical(f"vision_tower.{tensor.key}"): tensor for tensor in of_tower}


def _match(present: dict[str, Tensor], entries: tuple[Entry, ...], table: Table, folder: Path) -> None:
    wanted = {entry.key: entry for entry in entries}
    for key, tensor in present.items():
        if key not in wanted:
            if not table.names.ignores(key):
                raise InputError(f"{tensor.file}: unknown key {tensor.key} for model_type {table.family}")
        elif tensor.shape != wanted[key].shape:
            shapes = f"{list(tensor.shape)}, config.json says {list(wanted[key].shape)}"
            raise InputError(f"{tensor.file}: {tensor.key} has shape {shapes}")
        elif quantised := {tensor.dtype, tensor.read_as or tensor.dtype} - DTYPES.keys():
            raise InputError(
                f"{tensor.file}: {tensor.key} has dtype {quantised.pop()}: quantised weights are not supported"
            )
    missing = [key for key in wanted if key not in present]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{folder}: missing key {missing[0]}{others}")


def _match_updates(adapter: Adapter, entries: tuple[Entry, ...], table: Table) -> None:
    wanted = {entry.key: entry.shape for entry in entries}
    for key, updates in adapter.updates.items():
        tensor = updates[0].left
        if key not in wanted:
            if not table.names.ignores(key):
                raise InputError(f"{tensor.file}: {tensor.key} changes a tensor that the model does not have")
        elif not all(update.fits(wanted[key]) for update in updates):
            raise InputError(f"{tensor.file}: {tensor.key} does not fit its tensor of shape {list(wanted[key])}")
