"""Reads the config of a checkpoint folder, and makes the table of its tensors for the converter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from checkpoints_convert.entry import Table
from checkpoints_convert.sources import with_settings
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.families import FAMILIES, config_from_hf, model_type, shapes_by_path
from vlkv.files import read_json, require_json
from vlkv.processing.host import HostConfig


def describe(folder: Path) -> Table:
    """The converter's table for a folder; raises InputError like `read_config`."""
    return table_of(read_config(folder), read_raw(folder))


def table_of(config: ModelConfig, raw: dict[str, Any]) -> Table:
    """The converter's table for a model.

    The shapes have an output head even if the model is tied, because its checkpoint may contain one too.
    """
    return Table(
        family=config.family,
        config=raw,
        names=FAMILIES[config.family].names(config),
        shapes=lambda: shapes_by_path(with_head(config, tied=False)),
        tied=config.decoder.tied,
        special=FAMILIES[config.family].special,
    )


def with_head(config: ModelConfig, *, tied: bool) -> ModelConfig:
    """The config of the same model with (`tied`) or without the embedding table as its output head."""
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, tied=tied))


def read_config(folder: Path) -> HostConfig:
    """The model's config, from `config.json`, `generation_config.json` and added tokens; InputError if it is unfit."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    with with_settings(folder) as place:
        if not (place / "config.json").is_file():
            raise InputError(f"{place}: no config.json, so this is not a (complete) checkpoint folder")
        raw, generation = read_raw(place), read_json(place / "generation_config.json")
        try:
            return config_from_hf(raw, generation, _added_tokens(place))
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InputError(f"{place / 'config.json'}: malformed ({type(error).__name__}: {error})") from None


def read_raw(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`, completed from other files of the folder by `Family.complete`."""
    with with_settings(folder) as place:
        raw = require_json(place / "config.json")
        kind = model_type(raw)
        complete = FAMILIES[kind].complete
        return raw if complete is None else {**complete(raw, lambda name: read_json(place / name)), "model_type": kind}


def _added_tokens(folder: Path) -> dict[str, int]:
    """Added tokens of the tokenizer -> their ids. Newer kinds of files replace what older ones say."""
    older, newer = read_json(folder / "tokenizer_config.json") or {}, read_json(folder / "tokenizer.json") or {}
    return {
        **(read_json(folder / "added_tokens.json") or {}),
        **{token["content"]: int(number) for number, token in (older.get("added_tokens_decoder") or {}).items()},
        **{token["content"]: token["id"] for token in newer.get("added_tokens") or ()},
    }
