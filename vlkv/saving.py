"""Saves a compressed cache to a file, so that later questions about an image need no prefill of it.

    vlkv.save_cache("page.safetensors", params, cache)
    cache = vlkv.load_cache("page.safetensors", params, new_tokens=100, rows=[0, 0, 0])
    cache, logits = vlkv.extend(params, cache, questions)     # three of them about one page

The file is a safetensors file of the arrays of the cache, with their names and dtypes; codes of a quantised pool are
packed. Its metadata contains the structure of the cache, the model, the policy, and the version of the format. It
contains no code: the class of a policy is one of ours, or one that the program has already imported.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from pallas_kernels import DigitPool, Kernels, QuantizedPool
from vlkv import policies
from vlkv.analysis import profiles
from vlkv.cache.decode_state import DecodeState
from vlkv.cache.marks import Reselection
from vlkv.cache.pool import PackedCache, take_rows
from vlkv.cache.resizing import resize
from vlkv.cache.rings import Ring, Rings
from vlkv.cache.states import State
from vlkv.config import RopeConfig
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.files import one_line, replacing
from vlkv.inputs import Bounds
from vlkv.policies import Policy
from vlkv.sharding.placement import path_name

FORMAT, VERSION = "vlkv cache", "5"
_STATES = (PackedCache, QuantizedPool, DigitPool, DecodeState, Rings, Ring, State, Reselection, Bounds, RopeConfig)
_METHODS = (policies.Composed, policies.Slots, policies.Smooth, *(policies.registry | policies.without_keep).values())
_OWN: dict[str, type] = {cls.__name__: cls for cls in (*_STATES, *_METHODS)}  # by the names in the file
_NOT_SAVED = ("kernels",)  # chosen by the machine that loads the cache
_STACKED = {"tail_k": 2, "tail_v": 2, "decode_states": 0}  # fields of all layers -> axis L of their arrays


def save_cache(
    path: str | os.PathLike[str],
    params: Model,
    cache: PackedCache,
    *,
    policy: Policy | None = None,
    note: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a cache to a file atomically, and returns the content of its metadata.

    Args:
        path: the file; an existing one is replaced.
        params: the model that made the cache.
        cache: from `prefill`, `extend` or `decode_step`.
        policy: the policy that made the cache, for `read_note`. Caches with a decode state contain theirs.
        note: further content of the metadata, as JSON; see `read_note`.

    Raises:
        InputError: a file that cannot be written, a policy class that cannot be imported by its name, or a cache that
            is distributed over several processes.
    """
    arrays: dict[str, Any] = {}
    content = {
        "model": fingerprint(params),
        "policy": _encode(cache.policy if policy is None else policy, "policy", arrays),
        "cache": _encode(cache, "", arrays),
        "note": dict(note or {}),
    }
    path = Path(path)
    metadata = {"format": FORMAT, "version": VERSION, **{k: json.dumps(v) for k, v in content.items()}}
    try:
        with replacing(path) as partial:
            save_file(arrays, partial, metadata)
            partial.chmod(0o644)  # safetensors makes the file readable only by its owner
    except SafetensorError as error:  # also if the disk is full
        raise InputError(f"{path}: cannot be written ({one_line(error)[:100]})") from None
    return content


def load_cache(
    path: str | os.PathLike[str],
    params: Model,
    *,
    new_tokens: int | None = None,
    rows: Sequence[int] | None = None,
    kernels: Kernels | None = None,
) -> PackedCache:
    """Reads a cache that `save_cache` has written, for `extend` and `decode_step`.

    Args:
        path: the file.
        params: the same model, in the same dtype.
        new_tokens: capacity for tokens after the prompt, including those it already has; None: as saved.
        rows: which rows, see `vlkv.cache.take_rows`; None: all.
        kernels: implementations of the ops; None: those of the platform.

    Raises:
        InputError: the file is missing, damaged, or of another version or model; or its policy is not imported.
    """
    path = Path(path)
    header, arrays = _read(path)
    _check_model(path, header["model"], fingerprint(params))
    try:
        cache = _decode(header["cache"], arrays)
        assert isinstance(cache, PackedCache)
    except (AssertionError, KeyError, TypeError):
        raise InputError(f"{path}: parts of the cache are missing; save it again") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    parts = {name: _of_all_layers(getattr(cache, name), axis) for name, axis in _STACKED.items()}
    cache = dataclasses.replace(cache, **parts, kernels=Kernels() if kernels is None else kernels)
    cache = cache if rows is None else take_rows(cache, rows)
    return cache if new_tokens is None else resize(cache, new_tokens)


def read_note(path: str | os.PathLike[str]) -> tuple[Policy | None, dict[str, Any]]:
    """The policy that made a saved cache, or None, and the note; raises InputError like `load_cache`."""
    header, _ = _read(Path(path), arrays=False)
    return _decode(header["policy"], {}), header["note"]


def fingerprint(params: Model) -> dict[str, Any]:
    """Sizes, dtype, and a hash of config and weights: equal for the model that made a cache and the one that uses it.

    Settings of generation do not count, because a cache does not depend on them. A large model takes seconds, once per
    process.
    """
    config = dataclasses.replace(params.config, generation=())
    digest = hashlib.sha256(json.dumps(_settings(config), sort_keys=True).encode())
    digest.update(_digest(_Weights(jax.tree_util.tree_flatten_with_path(params)[0])))
    return {
        **profiles.fingerprint(params.config),
        "dtype": params.decoder.embedding.weight[...].dtype.name,
        "config and weights": digest.hexdigest()[:32],
    }


class _Weights:
    """The weights of a model by identity, as the key of `_digest`. It does not keep them alive."""

    def __init__(self, leaves: list[tuple[Any, Any]]) -> None:
        self.names = tuple(path_name(path) for path, _ in leaves)
        self.arrays = tuple(weakref.ref(leaf) for _, leaf in leaves)
        self.number = hash(tuple(id(leaf) for _, leaf in leaves))

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Weights) or self.names != other.names:
            return False
        both = ((a(), b()) for a, b in zip(self.arrays, other.arrays, strict=True))
        return all(a is b and a is not None for a, b in both)


@functools.lru_cache(maxsize=1)  # a program saves and loads many caches of a model
def _digest(weights: _Weights) -> bytes:
    """SHA-256 over the name, the shape and all bytes of each weight."""

    def of(pair: tuple[str, Any]) -> bytes:
        name, array = pair[0], pair[1]()
        digest = hashlib.sha256(f"{name} {array.shape}".encode())
        digest.update(np.ascontiguousarray(jax.device_get(array)).reshape(-1).view(np.uint8).data)
        return digest.digest()

    with ThreadPoolExecutor() as pool:  # hashlib and transfers release Python's lock
        return hashlib.sha256(b"".join(pool.map(of, zip(weights.names, weights.arrays, strict=True)))).digest()


def _settings(config: Any) -> Any:
    """A config as JSON without fields that have default values, so that new fields do not change the fingerprint."""
    if dataclasses.is_dataclass(config):
        fields = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
        return {name: _settings(value) for name, (value, default) in fields.items() if value != default}
    if isinstance(config, Mapping):
        return {str(name): _settings(value) for name, value in config.items()}
    if isinstance(config, tuple | list):
        return [_settings(value) for value in config]
    return config if config is None or isinstance(config, bool | int | float | str) else repr(config)


def _read(path: Path, *, arrays: bool = True) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """The metadata, and the arrays by name."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with safe_open(path, framework="flax") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path}: not a cache; `vlkv.save_cache` writes one")
            if (version := metadata.get("version")) != VERSION:
                remedy = f"this vlkv reads {VERSION}: make the cache again"
                raise InputError(f"{path}: a cache of version {version}, but {remedy}")
            header = {name: json.loads(metadata[name]) for name in ("model", "policy", "cache", "note")}
            return header, {name: file.get_tensor(name) for name in (file.keys() if arrays else ())}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: truncated or corrupt safetensors ({one_line(error)}); save it again") from None
    except (KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: its metadata cannot be read; save it again") from None


def _check_model(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name, value in ours.items():
        if saved.get(name) != value:
            what = f"{name} {saved.get(name)!r}, here {value!r}"
            if name == "config and weights":
                what = "the same sizes, but another config or other weights"
            raise InputError(f"{path}: the cache of another model: {what}; make the cache again with this model")


def _encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """A tree of dataclasses, dicts and tuples as JSON; its arrays are added to `arrays` under their paths."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray):
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise InputError("the cache is distributed over several processes: gather it before saving")
        arrays[name] = value
        return {"array": name}
    if isinstance(value, tuple):
        return [_encode(part, _join(name, i), arrays) for i, part in enumerate(value)]
    if isinstance(value, dict):
        return {"dict": {key: _encode(part, _join(name, key), arrays) for key, part in value.items()}}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise InputError(f"{name} is a {type(value).__name__}, which cannot be saved: use numbers, strings and tuples")
    names = [field.name for field in dataclasses.fields(value) if field.init and field.name not in _NOT_SAVED]
    fields = {field: _encode(getattr(value, field), _join(name, field), arrays) for field in names}
    return {"class": _spell(type(value)), "fields": fields}


def _decode(value: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return tuple(_decode(part, arrays) for part in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "dict" in value:
        return {key: _decode(part, arrays) for key, part in value["dict"].items()}
    return _find(value["class"])(**{name: _decode(part, arrays) for name, part in value["fields"].items()})


def _of_all_layers(part: Any, axis: int) -> Any:
    """A part of the cache, stacked along the axis of the layers; files from before December 2026 have one per layer."""
    if not isinstance(part, tuple):
        return part
    return jax.tree.map(lambda *x: jax.numpy.stack(x, axis=axis), *part) if part else None


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)


def _spell(cls: type) -> str:
    """The name of a class for `_find`: that of our own class, or `module:name` for another policy."""
    if _OWN.get(cls.__name__) is cls:
        return cls.__name__
    if not issubclass(cls, Policy) or "<locals>" in cls.__qualname__:
        where = "because it could not be imported: define it at the top of a module"
        raise InputError(f"{cls.__qualname__} cannot be saved, {where}")
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> type:
    if name in _OWN:
        return _OWN[name]
    module, _, rest = name.partition(":")
    cls: Any = sys.modules.get(module)  # not imported here, because a file must not run code
    for part in rest.split("."):
        cls = getattr(cls, part, None)
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise InputError(f"its policy is {rest or name} of the module {module}: import this module first")
    return cls
