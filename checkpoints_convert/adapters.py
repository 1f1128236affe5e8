"""LoRA adapters as peft writes them: `adapter_config.json` and `adapter_model.safetensors`.

An adapter changes tensors of its base model: it adds low-rank products to some (LoRA), and replaces others
(`modules_to_save`, biases). Both happen while a tensor is read. The two files are in the base model's folder, or in a
folder without weights, which names its base model.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert import tensors
from checkpoints_convert.sources import ADAPTER as CONFIG
from checkpoints_convert.sources import MERGE as _REMEDY
from checkpoints_convert.sources import TABLES
from checkpoints_convert.tensors import Tensor
from vlkv.errors import InputError
from vlkv.files import one_line, read_json

_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_MORE_WEIGHTS = "non_lora_trainables.bin"  # LLaVA's authors: what they trained besides the adapter
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.default)?((?:\.(?:weight|bias))?)")
_PAIRS = {False: ("lora_A.weight", "lora_B.weight"), True: ("lora_embedding_A", "lora_embedding_B")}  # by `transposed`
_KNOWN = {*TABLES["adapter"]["read"], *TABLES["adapter"]["without_effect"]}  # fields
# Other ways to initialise an adapter change the weights of the base model too.
_KEEP_THE_BASE = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclasses.dataclass(frozen=True)
class Update:
    """Adds `scale * left @ right` to a tensor; the tensor's axes after the first count as one."""

    left: Tensor  # [rows, rank], or [rank, rows] if `transposed`; without `right` [rows]
    right: Tensor | None  # [rank, columns], or [columns, rank] if `transposed`; None: the tensor is a vector
    scale: float
    transposed: bool = False  # both are, as for embeddings

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the product has the size of a tensor."""
        if self.right is None:
            return self.left.shape == shape
        left, right = self.left.shape, self.right.shape
        left, right = (left[::-1], right[::-1]) if self.transposed else (left, right)
        # The left factor of a convolution is a convolution of one pixel.
        joined = len(left) >= 2 and math.prod(left[2:]) == 1 and left[1] == right[0]
        return joined and (left[0], math.prod(right[1:])) == (shape[0], math.prod(shape[1:]))

    def read(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Both factors in float32, as matrices."""
        left = tensors.read(self.left).astype(np.float32)
        if self.right is None:
            return left * np.float32(self.scale), None
        right = tensors.read(self.right).astype(np.float32)
        left, right = (left.T, right.T) if self.transposed else (left, right)
        return left.reshape(len(left), -1) * np.float32(self.scale), right.reshape(len(right), -1)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What an adapter changes, by the names of the base model's tensors (new names)."""

    config: Mapping[str, Any]  # `adapter_config.json`
    files: tuple[Path, ...]
    replaced: Mapping[str, Tensor]  # tensors that replace those of the base model
    updates: Mapping[str, tuple[Update, ...]]  # what is then added to tensors of the base model


def open_adapter(folder: Path, canonical: Callable[[str], str], *, pickled: bool) -> Adapter | None:
    """The adapter in a folder; None if there is none.

    Args:
        folder: with both files.
        canonical: returns the new name of a tensor of the base model.
        pickled: whether weights pickled by torch are accepted.

    Raises:
        InputError: a part of the adapter is missing, damaged, or cannot be applied.
    """
    config = read_json(folder / CONFIG)
    files = [folder / name for name in _WEIGHTS if (folder / name).is_file()][:1]
    other_files = [file for file in [folder / _MORE_WEIGHTS] if file.is_file()]
    if config is None or not files:
        missing = CONFIG if config is None else _WEIGHTS[0]
        if config is not None or files or other_files:
            raise InputError(f"{folder / missing}: no such file, so its adapter is not complete")
        return None
    _check(config, folder / CONFIG)
    pairs: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    for file in files + other_files:
        if not pickled and file.suffix != ".safetensors":
            raise InputError(f"{file}: pickle weights can run code when opened: `vlkv convert` reads them safely")
        for tensor in tensors.headers(file, pickled):
            if tensor.dtype not in tensors.DTYPES:
                raise InputError(f"{file}: {tensor.key} has dtype {tensor.dtype}: quantised weights are not supported")
            key = tensor.key.removeprefix(_PREFIX)
            if part := _LORA.fullmatch(key):
                pairs.setdefault(part[1], {})[part[2] + part[3]] = tensor
            else:
                key = canonical(re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", key))
                if key in replaced:
                    raise InputError(f"{file}: {tensor.key} exists twice (also as {replaced[key].key})")
                replaced[key] = tensor
    updates: dict[str, tuple[Update, ...]] = {}
    for module, parts in pairs.items():
        for leaf, update in _updates(module, parts, config, folder / CONFIG):
            key = canonical(f"{module}.{leaf}")
            updates[key] = (*updates.get(key, ()), update)
    return Adapter(config, (folder / CONFIG, *files, *other_files), replaced, updates)


def _check(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError(f"{path}: peft_type={config.get('peft_type')!r} is not supported (only LORA): {_REMEDY}")
    for field, value in config.items():
        if field not in _KNOWN and value:
            raise InputError(f"{path}: {field}={str(value)[:40]} is not supported: {_REMEDY}")
    initialisation = config.get("init_lora_weights")
    if initialisation not in _KEEP_THE_BASE:
        name = str(initialisation)[:40]
        raise InputError(f"{path}: init_lora_weights={name!r} changes the base model too: {_REMEDY}")


def _updates(
    module: str, parts: Mapping[str, Tensor], config: Mapping[str, Any], path: Path
) -> Iterator[tuple[str, Update]]:
    transposed = "lora_embedding_A" in parts
    first, second = _PAIRS[transposed]
    if parts.keys() - {"lora_B.bias"} != {first, second}:
        other = next(iter(parts.values()))
        raise InputError(f"{other.file}: {other.key}: expected {first} and {second}, found {', '.join(parts)}")
    a, b = parts[first], parts[second]
    rank = _of_module(module, config, "rank_pattern", config.get("r", 8), path)
    alpha = _of_module(module, config, "alpha_pattern", config.get("lora_alpha", 8), path)
    if not rank or a.shape[:1] != (rank,):
        raise InputError(f"{a.file}: {a.key} has shape {list(a.shape)}, but the rank in {CONFIG} is {rank}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    left, right = (a, b) if transposed else (b, a)
    yield "weight", Update(left, right, scale, transposed)
    if "lora_B.bias" in parts:
        yield "bias", Update(parts["lora_B.bias"], None, scale)


def _of_module(module: str, config: Mapping[str, Any], field: str, default: Any, path: Path) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in peft."""
    patterns = config.get(field) or {}
    try:
        value = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)
    except (re.error, AttributeError) as error:
        raise InputError(f"{path}: {field} is malformed ({one_line(error)[:60]})") from None
    if not isinstance(value, int | float):
        raise InputError(f"{path}: {field}, r or lora_alpha is {value!r} for {module}: it must be a number")
    return value


def applied(part: np.ndarray, first: int, factors: list[tuple[np.ndarray, np.ndarray | None]], key: str) -> np.ndarray:
    """Rows of a tensor, from the row `first` on, with its updates, in their dtype; computed in float32.

    `factors` are those of each update; `key` names the tensor in messages. Raises InputError if a value overflows.
    """
    result = part.astype(np.result_type(part.dtype, np.float32))
    for left, right in factors:
        rows = left[first : first + len(part)]
        result += (rows if right is None else rows @ right).reshape(part.shape)
    return tensors.cast(result, part.dtype, key)
