"""`convert` writes a checkpoint to a folder that loads fast and describes its source.

The result is a Hugging Face folder (safetensors with the new names; config, tokenizer and processor files of the
source), or the same with orbax arrays as weights. Both have a manifest with checksums. The folder is written next to
its destination and renamed when it is complete. Until then it has no config.json, so it cannot be mistaken for a
checkpoint.

A conversion resumes after a kill. A shard is finished when the journal contains the checksums of its files. The journal
is replaced atomically after each shard. A later run keeps the shards in the journal whose checksums are right, and
removes all other files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from checkpoints_convert import byte_pairs, pieces
from checkpoints_convert.checkpoint import Checkpoint, open_checkpoint
from checkpoints_convert.entry import Table
from checkpoints_convert.sources import INDEX, MANIFEST, base_of, with_settings
from checkpoints_convert.tensors import Tensor
from vlkv.errors import InputError
from vlkv.files import read_json, require_json, write_json
from vlkv.terminal import progress_bar

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


Format = Literal["safetensors", "orbax"]
FORMATS: tuple[Format, ...] = ("safetensors", "orbax")
SHARD_BYTES = 256 * 2**20  # of a safetensors file, which is written in slices
PIECE_BYTES = 64 * 2**20  # of orbax's arrays, which must fit into memory
DTYPES = {kind.name: kind for kind in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))}
_TIE = "tie_word_embeddings"

__all__ = ["DTYPES", "FORMATS", "convert", "verify"]


def convert(
    source: Path,
    destination: Path,
    describe: Callable[[Path], Table],
    *,
    dtype: str | None = None,
    format: Format = "safetensors",
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Converts one folder into another.

    Args:
        source: a Hugging Face folder, or one in its authors' form. Weights may be pickles, which torch's weights-only
            loader reads; the tokenizer may be a sentencepiece or tiktoken file, which is converted. A LoRA adapter in
            it, or an adapter alone whose base model is on this machine, is merged into the weights.
        destination: a folder that does not exist. The folders above it are made.
        describe: returns the table of a checkpoint folder; raises InputError if it is not supported.
        dtype: float32, float16 or bfloat16; None: that of each tensor.
        format: "safetensors", or "orbax": arrays of our own shapes, for loading onto a mesh.
        progress: show a progress bar on stderr if that is a terminal.
        say: called with one line about what is resumed, if something is, and at the end with one about the result.

    Returns:
        The destination.

    Raises:
        InputError: the source is not valid, or the destination exists. No files are left. Any other interruption leaves
            a hidden folder next to the destination, from which the same call resumes.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if format not in FORMATS:
        raise InputError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if destination.exists():
        raise InputError(f"{destination}: already exists; give a new folder or remove it first")
    parent = next(folder for folder in destination.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise InputError(f"{parent}: is a file; give a folder to write into")
    if pieces.is_pieces(base_of(source)):
        raise InputError(f"{source}: contains orbax weights: convert the folder that it was made from")
    table = describe(source)
    checkpoint = open_checkpoint(source, table, pickled=True)
    with with_settings(source) as folder:
        tokenizer = byte_pairs.make(folder, table.special)
    partial = destination.with_name(f".{destination.name}.partial")
    conversion = _Conversion(checkpoint, partial, DTYPES[dtype] if dtype else None, format)
    try:
        extra = {} if tokenizer is None else {"tokenizer.json": tokenizer.to_str(pretty=True)}
        summary = conversion.write(extra, progress, say)
        partial.rename(destination)
    except InputError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    say(f"{destination}: {summary}")
    return destination


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """One conversion: writes `checkpoint` into `folder`, with the given dtype or (None) with that of each tensor."""

    checkpoint: Checkpoint
    folder: Path
    dtype: np.dtype | None
    kind: Format

    @functools.cached_property
    def plan(self) -> dict[str, list[str]]:
        """Names of shards -> the keys of tensors (safetensors) or the paths of parameters (orbax) in each."""
        if self.kind == "orbax":
            of_parameters = {path: _size(self.shapes[path], kind) for path, kind in self.kinds.items()}
            groups = list(_groups(of_parameters, PIECE_BYTES))
            return {f"params-{i:05d}-of-{len(groups):05d}": group for i, group in enumerate(groups, start=1)}
        tensors = self.checkpoint.tensors
        sizes = {x.key: _size(x.shape, self.dtype or tensors[x.key].own_dtype) for x in self.checkpoint.entries}
        groups = list(_groups(sizes, SHARD_BYTES))
        if len(groups) == 1:
            return {"model.safetensors": groups[0]}
        return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of our parameters."""
        return self.checkpoint.table.shapes()

    @functools.cached_property
    def kinds(self) -> dict[str, np.dtype]:
        """The dtypes of our parameters in orbax's format."""
        return {path: self.dtype or self.checkpoint.stored_dtype(path) for path in self.checkpoint.by_path}

    @functools.cached_property
    def used(self) -> list[Tensor]:
        """Every tensor that the model needs, once, even if several parameters share it."""
        keys = dict.fromkeys(entry.key for entry in self.checkpoint.entries)
        return [self.checkpoint.tensors[key] for key in keys]

    def write(self, extra: dict[str, str], progress: bool, say: Callable[[str], None]) -> str:
        """Writes weights, settings, the `extra` files (name -> text) and the manifest; returns a summary."""
        checkpoint, folder = self.checkpoint, self.folder
        journal = Journal(folder, self._job())
        if journal.before:
            say(f"{folder}: {journal.before}")
        self._write_weights(journal, progress)
        manifest = self._manifest(journal)
        digests, total = manifest["sha256"], manifest["bytes"]
        if self.kind == "safetensors" and len(self.plan) > 1:
            weight_map = {key: name for name, members in self.plan.items() for key in members}
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
            digests[INDEX] = sha256(folder / INDEX)
        for name, file in checkpoint.settings.items():
            if name not in ("config.json", INDEX, MANIFEST):
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, folder / name)
                digests[name] = sha256(folder / name)
        for name, text in extra.items():
            (folder / name).write_text(text, encoding="utf-8")
            digests[name] = sha256(folder / name)
        config = _retyped(dict(checkpoint.table.config), None if self.dtype is None else self.dtype.name)
        ready = folder / "config.json.new"
        write_json(ready, _untied(config) if checkpoint.table.tied and not checkpoint.tied else config)
        digests["config.json"] = sha256(ready)
        write_json(folder / MANIFEST, manifest)
        journal.close()
        # The last step, because a folder without config.json is not a checkpoint.
        ready.rename(folder / "config.json")
        kinds = sorted({(self.dtype or tensor.own_dtype).name for tensor in self.used})
        summary = f"{len(self.plan)} shard{'s' * (len(self.plan) > 1)}, {manifest['parameters']:,} parameters"
        return f"{summary} in {' and '.join(kinds)}, {size_text(total)}{self._left_out()}"

    def _write_weights(self, journal: Journal, progress: bool) -> None:
        with progress_bar("converting", sum(map(len, self.plan.values())), hidden=not progress) as advance:
            for name, members in self.plan.items():
                if name in journal.shards:
                    advance(len(members))
                    continue
                shard = _write_shard(self.checkpoint, members, self.folder / name, self.dtype, self.kind, advance)
                journal.finish(name, *shard)

    def _manifest(self, journal: Journal) -> dict[str, Any]:
        digests = [shard["sha256"] for shard in journal.shards.values()]
        manifest: dict[str, Any] = {
            "format": 2,
            "storage": self.kind,
            "source": self.checkpoint.base.resolve().name,
            "family": self.checkpoint.table.family,
            "dtype": "as in the source" if self.dtype is None else self.dtype.name,
            "parameters": sum(math.prod(tensor.shape) for tensor in self.used),
            "bytes": sum(shard["bytes"] for shard in journal.shards.values()),
            "sha256": {file: digest for shard in digests for file, digest in shard.items()},
        }
        if self.checkpoint.adapter is not None:
            manifest["adapter"] = self.checkpoint.folder.resolve().name
        if self.kind == "orbax":  # parameter -> its piece, dtype and shape
            piece_of = {path: piece for piece, paths in self.plan.items() for path in paths}
            manifest["weights"] = {
                path: (piece, self.kinds[path].name, self.shapes[path]) for path, piece in piece_of.items()
            }
        return manifest

    def _job(self) -> dict[str, Any]:
        """Properties that must be equal for two runs that write the same shards, as JSON."""
        adapter = self.checkpoint.adapter
        files = {
            file.resolve() for file in [tensor.file for tensor in self.used] + list(adapter.files if adapter else ())
        }
        stats = {str(file): file.stat() for file in sorted(file.resolve() for file in files)}
        return {
            "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "adapter": None if adapter is None else dict(adapter.config),
            "dtype": None if self.dtype is None else self.dtype.name,
            "storage": self.kind,
            "plan": self.plan,
        }

    def _left_out(self) -> str:
        """Names the tensors of the source that the model does not use, such as a tower's pooling head."""
        used = {entry.key for entry in self.checkpoint.entries}
        unused = sorted(tensor.key for key, tensor in self.checkpoint.tensors.items() if key not in used)
        return f"; unused tensors left out: {len(unused)}, such as {unused[0]}" if unused else ""


def _write_shard(
    checkpoint: Checkpoint,
    members: list[str],
    path: Path,
    dtype: np.dtype | None,
    kind: Format,
    done: Callable[[], Any],
) -> tuple[dict[str, str], int]:
    """Writes a shard; returns the digests of its files and the bytes of its tensors."""
    if kind == "orbax":
        nbytes = pieces.write(checkpoint, members, path, dtype, done)
        return digests_below(path), nbytes
    digest, nbytes = checkpoint.write_safetensors(members, path, dtype, done)
    return {path.name: digest}, nbytes


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _groups(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Groups neighbours with at most `most` bytes together."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _retyped(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The config with the new dtype of the weights, also in nested parts."""
    if dtype is None:
        return config
    named = {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    return {key: _retyped(value, dtype) if isinstance(value, dict) else value for key, value in named.items()}


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a model whose head is not the embedding table, also in nested parts."""
    parts = {key: {**value, _TIE: False} for key, value in config.items() if isinstance(value, dict) and _TIE in value}
    return {**config, **parts, _TIE: False}
