"""Reads the tensor names of families from the tables in `vlkv/data/names`, whose README describes them."""

from __future__ import annotations

import functools
import operator
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from checkpoints_convert.entry import Fused, Name, Names, Shaped, Stacked
from vlkv.config import ModelConfig
from vlkv.files import DATA

# Path of our module or parameter -> its name in the checkpoint, as in `Names.ours`.
Ours = dict[str, Name | tuple[Name, ...]]
Raw = Mapping[str, Any]
_FOR_ALL_FAMILIES = ("decoders", "shared")
_KINDS = {"fused": Fused, "shaped": Shaped, "stacked": Stacked}


def stored_names(form: str) -> Callable[[ModelConfig], Names]:
    """For `Family.names`: returns the names of all parameters, from the table called `form`."""

    def names(config: ModelConfig) -> Names:
        table, vision = _form(form), config.vision
        prefix = table.get("decoder")
        ours = {} if prefix is None else decoder(config, prefix)
        unused = filter(None, (table.get("unused"), *_unused_layers(config, re.escape(prefix or ""))))
        return Names(
            ours=ours | _flat(table["names"], vision, _tables("shared")),
            renames=tuple(table["renames"]),
            unused="|".join(unused) or r"(?!)",
            blocks=operator.attrgetter(table["blocks"])(config) if "blocks" in table else 0,
            tower=(config.wiring.tower, table["tower"]) if "tower" in table else None,
        )

    return names


@functools.cache
def _tables(file: str) -> Raw:
    return tomllib.loads((DATA / "names" / f"{file}.toml").read_text(encoding="utf-8"))


@functools.cache
def _form(form: str) -> Raw:
    """A table with what it takes from others."""
    files = (file.stem for file in sorted((DATA / "names").glob("*.toml")) if file.stem not in _FOR_ALL_FAMILIES)
    table = next(tables[form] for tables in map(_tables, files) if form in tables)
    base = _form(table["like"]) if "like" in table else {"names": {}, "renames": ()}
    lists = _tables("shared")["renames"]
    renames = [pair for part in table.get("renames", ()) for pair in (lists[part] if isinstance(part, str) else [part])]
    merged = _merged(base, table)
    return merged | {"renames": (*map(tuple, renames), *base["renames"])}


def _merged(base: Raw, table: Raw) -> dict[str, Any]:
    """Both tables together; `table` has the last word, and the keys that only it has come last."""
    merged = dict(base)
    for key, value in table.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def decoder(config: ModelConfig, prefix: str) -> Ours:
    """Path of each parameter of a decoder -> its name in the checkpoint, which starts with `prefix`."""
    tables, kind = _tables("decoders"), config.decoder.names or "llama"
    layers = {"layers.*": {"like": [kind], "prefix": "layers.*."}}
    names = _flat({**tables.get(f"{kind}_top", tables["top"]), **layers}, None, tables)
    return below("decoder.", prefix, names) | {"decoder.head": "lm_head"}


def below(ours: str, theirs: str, names: Mapping[str, Name | tuple[Name, ...]]) -> Ours:
    """`names` with the prefix `ours` before our paths and the prefix `theirs` before the checkpoint's names."""

    def full(name: Name) -> Name:
        return theirs + name if isinstance(name, str) else replace(name, key=theirs + name.key)

    return {
        ours + path: tuple(map(full, name)) if isinstance(name, tuple) else full(name) for path, name in names.items()
    }


def _flat(table: Raw, vision: Any, shared: Raw) -> Ours:
    """The names in a table, and in the tables within it; `shared` has the tables that `like` names."""
    table, names = _extended(table, shared), Ours()
    for key, value in table.items():
        if key in ("like", "prefix"):
            continue
        if isinstance(value, Mapping) and not value.keys() & _KINDS.keys():
            names |= below(f"{key}.", "", _flat(value, vision, shared))
            continue
        paths = key.split()
        differing = _differing(paths)
        for path, part in zip(paths, differing, strict=True):
            options = [_name(x, part, differing, vision) for x in (value if isinstance(value, list) else [value])]
            names[path] = tuple(options) if isinstance(value, list) else options[0]
    return below("", table.get("prefix", ""), names)


def _extended(table: Raw, shared: Raw) -> Raw:
    for base in reversed(table.get("like", ())):
        table = _merged(_extended(shared[base], shared), table)
    return table


def _differing(paths: list[str]) -> tuple[str, ...]:
    """The part of each path in which they differ; of a single path, the last part."""
    columns = list(zip(*(path.split(".") for path in paths), strict=True))
    return next((column for column in columns if len(set(column)) > 1), columns[-1])


def _name(value: str | Raw, part: str, of: tuple[str, ...], vision: Any) -> Name:
    if isinstance(value, str):
        return value.replace("{}", part)
    kind = next(kind for kind in _KINDS if kind in value)
    options = {name: option for name, option in value.items() if name != kind}
    if kind == "fused":
        options["of"] = of
    if kind == "shaped":
        options["shape"] = tuple(getattr(vision, n) if isinstance(n, str) else n for n in value["shape"])
    return _KINDS[kind](value[kind].replace("{}", part), **options)


def _unused_layers(config: ModelConfig, prefix: str) -> list[str]:
    """Regular expressions of tensors that a checkpoint has and the decoder does not need.

    Gemma 4: projections of keys and values in layers that use those of earlier layers. Qwen3.5: the layers that predict
    further tokens.
    """
    if config.decoder.recurrent is not None:
        return [r"^mtp\."]
    shared = "|".join(str(i) for i, kind in enumerate(config.decoder.kinds) if kind.shared)
    return [rf"^{prefix}layers\.(?:{shared})\.self_attn\.(?:[kv]_proj|[kv]_norm)\."] if shared else []
