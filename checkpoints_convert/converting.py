"""`convert` writes a checkpoint to a folder that loads fast and describes its source.

The result is a Hugging Face folder (safetensors with the new names; config, tokenizer and processor files of the
source), or the same with orbax arrays as weights. Both have a manifest. The folder is written next to its destination
and renamed when it is complete. Until then it has no config.json, so it cannot be mistaken for a checkpoint. A
conversion resumes after a kill.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from checkpoints_convert import byte_pairs, pieces, slices
from checkpoints_convert.checkpoint import Checkpoint, open_checkpoint
from checkpoints_convert.entry import Table
from checkpoints_convert.journal import Journal
from checkpoints_convert.manifest import digests_below, sha256, size_text, verify
from checkpoints_convert.sources import INDEX, MANIFEST, base_of, with_settings
from checkpoints_convert.tensors import Tensor
from vlkv.errors import InputError
from vlkv.files import write_json
from vlkv.terminal import progress_bar

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
    above = next(folder for folder in destination.absolute().parents if folder.exists())
    if not above.is_dir():
        raise InputError(f"{above}: is a file; give a folder to write into")
    if pieces.is_pieces(base_of(source)):
        raise InputError(f"{source}: contains orbax weights: convert the folder that it was made from")
    table = describe(source)
    checkpoint = open_checkpoint(source, table, pickled=True)
    with with_settings(source) as folder:
        made = byte_pairs.make(folder, table.special)
    partial = destination.with_name(f".{destination.name}.partial")
    try:
        extra = {} if made is None else {"tokenizer.json": made.to_str(pretty=True)}
        summary = _write(checkpoint, partial, DTYPES[dtype] if dtype else None, format, extra, progress, say)
        partial.rename(destination)
    except InputError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    say(f"{destination}: {summary}")
    return destination


def _write(
    checkpoint: Checkpoint, folder: Path, dtype: np.dtype | None, kind: Format, extra: dict[str, str], progress: bool,
    say: Callable[[str], None],
) -> str:  # fmt: skip
    """Writes the weights, then copies of the settings and the `extra` files (name -> text), then the manifest.

    Returns one line about what was written.
    """
    plan = _plan(checkpoint, dtype, kind)
    journal = Journal(folder, _job(checkpoint, dtype, kind, plan))
    if journal.before:
        say(f"{folder}: {journal.before}")
    with progress_bar("converting", sum(map(len, plan.values())), hidden=not progress) as advance:
        for name, members in plan.items():
            if name in journal.shards:
                advance(len(members))
            else:
                digests, nbytes = _write_shard(checkpoint, members, folder / name, dtype, kind, advance)
                journal.finish(name, digests, nbytes)
    digests = {file: digest for shard in journal.shards.values() for file, digest in shard["sha256"].items()}
    total = sum(shard["bytes"] for shard in journal.shards.values())
    manifest: dict[str, Any] = {
        "format": 2,
        "storage": kind,
        "source": checkpoint.base.resolve().name,
        "family": checkpoint.table.family,
        "dtype": "as in the source" if dtype is None else dtype.name,
        "parameters": sum(math.prod(tensor.shape) for tensor in _used(checkpoint)),
        "bytes": total,
        "sha256": digests,
    }
    if checkpoint.adapter is not None:
        manifest["adapter"] = checkpoint.folder.resolve().name
    if kind == "orbax":
        manifest["weights"] = _weights(checkpoint, plan, dtype)
    elif len(plan) > 1:
        weight_map = {key: name for name, members in plan.items() for key in members}
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
    config = _retyped(dict(checkpoint.table.config), None if dtype is None else dtype.name)
    if checkpoint.table.tied and not checkpoint.tied:
        config = _untied(config)
    ready = folder / "config.json.new"
    write_json(ready, config)
    digests["config.json"] = sha256(ready)
    write_json(folder / MANIFEST, manifest)
    journal.close()
    # The last step, because a folder without config.json is not a checkpoint.
    ready.rename(folder / "config.json")
    kinds = sorted({(dtype or tensor.own_dtype).name for tensor in _used(checkpoint)})
    return (
        f"{len(plan)} shard{'s' * (len(plan) > 1)}, {manifest['parameters']:,} parameters in {' and '.join(kinds)}, "
        f"{size_text(total)}{_left_out(checkpoint)}"
    )


def _left_out(checkpoint: Checkpoint) -> str:
    """Names the tensors of the source that the model does not use, such as a tower's pooling head."""
    used = {entry.key for entry in checkpoint.entries}
    unused = sorted(tensor.key for key, tensor in checkpoint.tensors.items() if key not in used)
    if not unused:
        return ""
    return f"; unused tensors left out: {len(unused)}, such as {unused[0]}"


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
    digest, nbytes = slices.write(checkpoint, members, path, dtype, done)
    return {path.name: digest}, nbytes


def _plan(checkpoint: Checkpoint, dtype: np.dtype | None, kind: Format) -> dict[str, list[str]]:
    """Names of shards -> the keys of tensors (safetensors) or the paths of parameters (orbax) in each."""
    if kind == "orbax":
        groups = list(_groups(_sizes_of_parameters(checkpoint, dtype), PIECE_BYTES))
        return {f"params-{i:05d}-of-{len(groups):05d}": group for i, group in enumerate(groups, start=1)}
    sizes = {entry.key: _size(entry.shape, dtype or checkpoint.tensors[entry.key].own_dtype)
             for entry in checkpoint.entries}  # fmt: skip
    groups = list(_groups(sizes.items(), SHARD_BYTES))
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _sizes_of_parameters(checkpoint: Checkpoint, dtype: np.dtype | None) -> Iterator[tuple[str, int]]:
    shapes = checkpoint.table.shapes()
    for path in checkpoint.by_path:
        yield path, _size(shapes[path], dtype or checkpoint.stored_dtype(path))


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _groups(sizes: Iterable[tuple[str, int]], most: int) -> Iterator[list[str]]:
    """Groups neighbours with at most `most` bytes together."""
    group: list[str] = []
    total = 0
    for name, size in sizes:
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _job(checkpoint: Checkpoint, dtype: np.dtype | None, kind: Format, plan: dict[str, list[str]]) -> dict[str, Any]:
    """Properties that must be equal for two runs that write the same shards, as JSON."""
    adapter = checkpoint.adapter
    files = {tensor.file.resolve() for tensor in _used(checkpoint)}
    files |= set() if adapter is None else {file.resolve() for file in adapter.files}
    stats = {str(file): file.stat() for file in sorted(files)}
    return {
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "adapter": None if adapter is None else dict(adapter.config),
        "dtype": None if dtype is None else dtype.name,
        "storage": kind,
        "plan": plan,
    }


def _weights(
    checkpoint: Checkpoint, plan: dict[str, list[str]], dtype: np.dtype | None
) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Parameter -> its piece, dtype and shape."""
    shapes = checkpoint.table.shapes()
    return {
        path: (piece, (dtype or checkpoint.stored_dtype(path)).name, shapes[path])
        for piece, paths in plan.items()
        for path in paths
    }


def _used(checkpoint: Checkpoint) -> list[Tensor]:
    """Every tensor that the model needs, once, even if several parameters share it."""
    return [checkpoint.tensors[key] for key in dict.fromkeys(entry.key for entry in checkpoint.entries)]


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
