"""`convert`: a checkpoint, tensor by tensor, into a folder that loads fast and says where it came from.

The result is again a Hugging Face style folder (safetensors under the new-style names, the source's config, tokenizer
and processor files) plus a manifest. It is written beside its destination and renamed when complete; until then it
holds no config.json, so nothing would take it for a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from checkpoints_convert.reading import INDEX, Checkpoint, cast, open_checkpoint, read_raw, require_json
from vlkv.errors import InputError

MANIFEST = "vlkv_manifest.json"
SHARD_BYTES = 256 * 2**20  # memory in use is about one shard
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def convert(source: Path, destination: Path, *, dtype: str | None = None, progress: bool = True) -> Path:
    """Converts one folder into another.

    Args:
        source: a Hugging Face folder.
        destination: must not exist yet.
        dtype: float32, float16 or bfloat16; None keeps each tensor's own.
        progress: whether to draw a bar on stderr.

    Returns:
        The destination.

    Raises:
        InputError: something is wrong with the source, or the destination exists. Nothing is left behind.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if destination.exists():
        raise InputError(f"{destination}: exists already; give a new folder or remove it first")
    if not destination.parent.is_dir():
        raise InputError(f"{destination.parent}: no such folder to write into")
    checkpoint = open_checkpoint(source)
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir()
    try:
        _write(checkpoint, partial, dtype, progress)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination


def verify(folder: Path) -> None:
    """Compares every file of a converted folder with its manifest; InputError names the first that differs."""
    digests = require_json(folder / MANIFEST).get("sha256")
    if not isinstance(digests, dict) or "config.json" not in digests:
        raise InputError(f"{folder / MANIFEST}: lists no checksums: convert again")
    for name, digest in digests.items():
        if name != Path(name).name or not (folder / name).is_file():
            raise InputError(f"{folder / name}: missing, though the manifest lists it")
        if _sha256(folder / name) != digest:
            raise InputError(f"{folder / name}: checksum differs from the manifest: convert again")


def _write(checkpoint: Checkpoint, folder: Path, dtype: str | None, progress: bool) -> None:
    shards = list(_shards(checkpoint, dtype))
    weight_map: dict[str, str] = {}
    digests: dict[str, str] = {}
    total = 0
    with tqdm(total=sum(map(len, shards)), unit="tensor", disable=not progress) as bar:
        for number, keys in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors = {}
            for key in keys:
                tensors[key] = cast(checkpoint.read_tensor(key), DTYPES[dtype] if dtype else None, key)
                total += tensors[key].nbytes
                weight_map[key] = name
                bar.update()
            save_file(tensors, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(0o644)  # safetensors writes for the owner alone
            del tensors
            digests[name] = _sha256(folder / name)
    if len(shards) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        digests[INDEX] = _sha256(folder / INDEX)
    for name, file in checkpoint.settings.items():
        if name not in ("config.json", INDEX, MANIFEST):
            shutil.copyfile(file, folder / name)
            digests[name] = _sha256(folder / name)
    config = json.dumps(_retyped(read_raw(checkpoint.folder), dtype), indent=2) + "\n"
    digests["config.json"] = hashlib.sha256(config.encode()).hexdigest()
    _write_json(
        folder / MANIFEST,
        {
            "format": 1,
            "source": checkpoint.folder.resolve().name,
            "family": checkpoint.config.family,
            "dtype": dtype or "as in the source",
            "parameters": sum(int(np.prod(shape)) for shape in _shapes(checkpoint).values()),
            "bytes": total,
            "sha256": digests,
        },
    )
    # Last: a folder without config.json is no checkpoint.
    (folder / "config.json").write_text(config, encoding="utf-8")


def _retyped(config: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """The config, saying the dtype that the weights now have, in its nested parts too."""
    if dtype is None:
        return config
    named = {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in config.items()}
    return {key: _retyped(value, dtype) if isinstance(value, dict) else value for key, value in named.items()}


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Of every tensor; several parameters may share one."""
    return {entry.key: entry.shape for entry in checkpoint.entries}


def _shards(checkpoint: Checkpoint, dtype: str | None) -> Iterator[list[str]]:
    shard: list[str] = []
    size = 0
    for key, shape in _shapes(checkpoint).items():
        width = DTYPES[dtype].itemsize if dtype else {"F64": 8, "F32": 4}.get(checkpoint.tensors[key].dtype, 2)
        nbytes = int(np.prod(shape)) * width
        if shard and size + nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(key)
        size += nbytes
    yield shard


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
