"""Finds the files of a checkpoint: weights, settings, and the base model of an adapter."""

from __future__ import annotations

import shutil
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlkv.errors import InputError
from vlkv.files import read_json, require_json

# Tables of transformers' tokenizer classes and of peft's fields.
TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
INDEX = "model.safetensors.index.json"
MANIFEST = "vlkv_manifest.json"
ADAPTER = "adapter_config.json"
MERGE = "merge it with peft (merge_and_unload)"
# Single file of the weights and index of several, in the order in which transformers looks for them.
_WEIGHTS = (("model.safetensors", INDEX), ("pytorch_model.bin", "pytorch_model.bin.index.json"))
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SETTINGS = "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja"
_TOWER_SETTINGS = "*/config.json", "*/preprocessor_config.json"  # if the tower has a folder of its own


def weight_files(folder: Path, pickled: bool) -> list[Path]:
    """The files of weights: safetensors if there are any, else pickles if `pickled`.

    A single file is preferred to an index, which may be left from an earlier save into the same folder.

    Raises:
        InputError: there are none, they are not accepted, or an index is not valid.
    """
    for single, index in _WEIGHTS if pickled else _WEIGHTS[:1]:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _indexed(folder / index)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        single, index = _WEIGHTS[1]
        remedy = f"name it {single}, or write {index}" if pickled else "`vlkv convert` reads them safely"
        raise InputError(f"{folder}: only pickle weights (.bin, .pt), which can run code when opened: {remedy}")
    raise InputError(f"{folder}: no model.safetensors and no {INDEX}")


def _indexed(index: Path) -> list[Path]:
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


def base_of(folder: Path) -> Path:
    """The folder of the weights: `folder`, or if it contains an adapter without weights, that of its base model.

    The base model is a folder or a snapshot of the hub on this machine. It is never downloaded, because an adapter that
    we do not trust could name it.

    Raises:
        InputError: the base model is not on this machine, or is an adapter too.
    """
    config = read_json(folder / ADAPTER)
    if config is None or any((folder / name).is_file() for name in (MANIFEST, *sum(_WEIGHTS, ()))):
        return folder
    name = config.get("base_model_name_or_path")
    base = _local(name, config.get("revision")) if isinstance(name, str) and name else None
    if base is None:
        remedy = "download it, or copy the adapter into its folder"
        raise InputError(f"{folder / ADAPTER}: its base model {name!r} is not on this machine: {remedy}")
    if (base / ADAPTER).is_file():
        raise InputError(f"{folder / ADAPTER}: its base model {name!r} contains an adapter too: {MERGE} first")
    return base


def _local(name: str, revision: Any) -> Path | None:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 (slow to import)

    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except Exception:  # the package raises many kinds of errors, also for names that cannot be hub ids
        return None


def settings(folder: Path) -> dict[str, Path]:
    """Files of config, tokenizer, templates and processor by relative name.

    For an adapter alone, files of its folder replace those of the same name of the base model's folder.
    """
    return {
        path.relative_to(parent).as_posix(): path
        for parent in dict.fromkeys((base_of(folder), folder))
        for pattern in (*_SETTINGS, *_TOWER_SETTINGS)
        for path in parent.glob(pattern)
        if path.is_file() and path.name != ADAPTER and not path.name.endswith(".index.json")
    }


@contextmanager
def with_settings(folder: Path) -> Iterator[Path]:
    """A folder that contains all settings: `folder`, or for an adapter alone a temporary folder with copies."""
    if base_of(folder) == folder:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="vlkv-") as name:
        for file, source in settings(folder).items():
            (Path(name) / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, Path(name) / file)
        try:
            yield Path(name)
        except InputError as error:
            raise InputError(str(error).replace(name, str(folder))) from None
