"""A compressed cache in a file: an image is read once, and serves questions for as long as the model stays the same.

    vlkv.save_cache("page.safetensors", params, cache)
    cache = vlkv.load_cache("page.safetensors", params, new_tokens=100, rows=[0, 0, 0])
    cache, logits = vlkv.extend(params, cache, questions)     # three of them about one page

The file is a safetensors file like any other: its tensors are the arrays of the cache under their own names and in
their own dtypes (packed codes of a quantised pool stay packed), its metadata says how they hang together, which model
and which policy made them, and the version of all this. Nothing in it is code: a class of a policy is looked up among
ours, or, one's own, among those that the program has imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from pallas_kernels import Kernels, QuantizedPool
from vlkv import policies, profiles
from vlkv.cache import PackedCache, resize, take_rows
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.files import one_line, replacing
from vlkv.memory import Memory
from vlkv.policies import Policy
from vlkv.sharding import path_name

FORMAT, VERSION, READS = "vlkv cache", "2", ("1", "2")
_CORNER = 4  # numbers of each axis of a weight that tell one model from another
_OWN: dict[str, type] = {
    cls.__name__: cls for cls in (PackedCache, QuantizedPool, Memory, policies.Composed, *policies.registry.values())
}
_NOT_SAVED = ("kernels",)  # the machine that loads has its own


def save_cache(
    path: str | os.PathLike[str],
    params: Model,
    cache: PackedCache,
    *,
    policy: Policy | None = None,
    note: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a cache, whole or not at all, and returns what the file says about it.

    Args:
        path: the file; one that is there is replaced.
        params: the model that made the cache.
        cache: of `prefill`, `extend` or `decode_step`.
        policy: the one that made the cache, for the record. Caches of methods that act while decoding carry theirs.
        note: what else the file shall say, as JSON has it; see `read_note`.

    Raises:
        InputError: no such folder, a policy that cannot be found again by its name, or a cache that is spread over
            several processes.
    """
    arrays: dict[str, Any] = {}
    content = {
        "model": fingerprint(params),
        "policy": _encode(policy if cache.policy is None else cache.policy, "policy", arrays),
        "cache": _encode(cache, "", arrays),
        "note": dict(note or {}),
    }
    path = Path(path)
    with replacing(path) as partial:
        save_file(
            arrays, partial, {"format": FORMAT, "version": VERSION, **{k: json.dumps(v) for k, v in content.items()}}
        )
        partial.chmod(0o644)  # safetensors makes it readable by its owner alone
    return content


def load_cache(
    path: str | os.PathLike[str],
    params: Model,
    *,
    new_tokens: int | None = None,
    rows: Sequence[int] | None = None,
    kernels: Kernels | None = None,
) -> PackedCache:
    """A cache that `save_cache` has written, ready for `extend` and `decode_step`.

    Args:
        path: the file.
        params: the same model, in the same dtype.
        new_tokens: the most tokens that may follow the prompt, those fed included; None: as it was saved.
        rows: which rows, see `vlkv.cache.take_rows`; None: all.
        kernels: implementations of the ops; None: of the platform.

    Raises:
        InputError: no such file, a damaged one, one of another version or model, or a policy that is not imported.
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
    cache = dataclasses.replace(cache, kernels=Kernels() if kernels is None else kernels)
    cache = cache if rows is None else take_rows(cache, rows)
    return cache if new_tokens is None else resize(cache, new_tokens)


def read_note(path: str | os.PathLike[str]) -> tuple[Policy | None, dict[str, Any]]:
    """The policy that made a saved cache, if it was said, and the note; raises InputError as `load_cache`."""
    header, _ = _read(Path(path), arrays=False)
    return _decode(header["policy"], {}), header["note"]


def fingerprint(params: Model) -> dict[str, Any]:
    """What must agree between the model that made a cache and the one that goes on with it.

    Its sizes, its dtype, and a hash of its config and of two corners of every weight, which any training changes.
    """
    leaves = [(path_name(keypath), leaf) for keypath, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]
    corners = [
        leaf[(slice(end),) * leaf.ndim if end > 0 else (slice(end, None),) * leaf.ndim]
        for _, leaf in leaves
        for end in (_CORNER, -_CORNER)
    ]
    digest = hashlib.sha256(json.dumps(_settings(params.config), sort_keys=True).encode())
    for (name, leaf), *ends in zip(leaves, *[iter(jax.device_get(corners))] * 2, strict=True):
        digest.update(f"{name} {leaf.shape}".encode())
        for end in ends:
            digest.update(np.ascontiguousarray(end).tobytes())
    return {
        **profiles.fingerprint(params.config),
        "dtype": params.decoder.embedding.weight[...].dtype.name,
        "config and weights": digest.hexdigest()[:32],
    }


def _settings(config: Any) -> Any:
    """A config as JSON without what stands at its default, so that a field added later changes no fingerprint."""
    if dataclasses.is_dataclass(config):
        fields = {field.name: (getattr(config, field.name), field.default) for field in dataclasses.fields(config)}
        return {name: _settings(value) for name, (value, default) in fields.items() if value != default}
    if isinstance(config, Mapping):
        return {str(name): _settings(value) for name, value in config.items()}
    if isinstance(config, tuple | list):
        return [_settings(value) for value in config]
    return config if config is None or isinstance(config, bool | int | float | str) else repr(config)


def _read(path: Path, *, arrays: bool = True) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """The header, and the arrays by name."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with safe_open(path, framework="flax") as file:
            said = file.metadata() or {}
            if said.get("format") != FORMAT:
                raise InputError(f"{path}: not a cache; `vlkv.save_cache` writes one")
            if said.get("version") not in READS:
                raise InputError(
                    f"{path}: a cache of version {said.get('version')}, this vlkv reads {' and '.join(READS)}: read "
                    "the image again and save its cache"
                )
            header = {name: json.loads(said[name]) for name in ("model", "policy", "cache", "note")}
            tensors = {name: file.get_tensor(name) for name in (file.keys() if arrays else ())}
            if arrays and said["version"] == "1":
                _from_version_1(header["cache"]["fields"]["memory"] or (), tensors)
            return header, tensors
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: truncated or corrupt safetensors ({one_line(error)}); save it again") from None
    except (KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: its metadata cannot be read; save it again") from None


def _from_version_1(memories: Sequence[dict[str, Any]], arrays: dict[str, jax.Array]) -> None:
    """Gives each layer's memory the fields of version 2: no slot was reused, and the core was a list of slots."""
    for i, memory in enumerate(memories):
        fields = memory["fields"]
        stored, place = (arrays[fields[name]["array"]] for name in ("stored", "place"))
        order = jnp.argsort(jnp.where(stored, place, jnp.iinfo(jnp.int32).max), axis=-1)
        arrays[f"memory.{i}.rank"] = jnp.argsort(order, axis=-1).astype(jnp.int32)
        arrays[f"memory.{i}.slots"] = jnp.full(stored.shape[:-1], stored.shape[-1], jnp.int32)
        fields |= {name: {"array": f"memory.{i}.{name}"} for name in ("rank", "slots")}
        if fields["core"] is not None:
            core = fields["values"]["dict"].pop("core")["array"]
            arrays[core] = arrays[core] > 0
            fields |= {"core": {"array": core}, "core_only": fields["core"]["fields"]["suffices"]}


def _check_model(path: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name, value in ours.items():
        if saved.get(name) != value:
            what = f"{name} {saved.get(name)!r}, here {value!r}"
            if name == "config and weights":
                what = "the same sizes, but another config or other weights"
            raise InputError(f"{path}: the cache of another model: {what}; read the image again with this one")


def _encode(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """A tree of dataclasses, dicts and tuples as JSON; its arrays go into `arrays` under their paths."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray):
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise InputError("the cache is spread over several processes: gather it before it is saved")
        arrays[name] = value
        return {"array": name}
    if isinstance(value, tuple):
        return [_encode(part, _join(name, i), arrays) for i, part in enumerate(value)]
    if isinstance(value, dict):
        return {"dict": {key: _encode(part, _join(name, key), arrays) for key, part in value.items()}}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise InputError(f"{name} is a {type(value).__name__}, which cannot be saved: use numbers, texts and tuples")
    names = [field.name for field in dataclasses.fields(value) if field.init and field.name not in _NOT_SAVED]
    fields = {field: _encode(getattr(value, field), _join(name, field), arrays) for field in names}
    return {"class": _spell(type(value)), "fields": fields}


def _decode(value: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """What `_encode` was given."""
    if isinstance(value, list):
        return tuple(_decode(part, arrays) for part in value)
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]]
    if "dict" in value:
        return {key: _decode(part, arrays) for key, part in value["dict"].items()}
    return _find(value["class"])(**{name: _decode(part, arrays) for name, part in value["fields"].items()})


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)


def _spell(cls: type) -> str:
    """A name under which `_find` finds the class: ours by its own, another policy as module:name."""
    if _OWN.get(cls.__name__) is cls:
        return cls.__name__
    if not issubclass(cls, Policy) or "<locals>" in cls.__qualname__:
        raise InputError(
            f"{cls.__qualname__} cannot be saved, since it could not be found again: define it at the top of a module"
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def _find(name: str) -> type:
    if name in _OWN:
        return _OWN[name]
    module, _, rest = name.partition(":")
    found: Any = sys.modules.get(module)  # importing what a file names would run code of its choice
    for part in rest.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InputError(f"its policy is {rest or name} of the module {module}, which must be imported first")
    return found
