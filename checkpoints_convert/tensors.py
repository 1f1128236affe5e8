"""Finds tensors in the files of a checkpoint, and reads them in slices.

Weights pickled by torch need torch, but no memory. A pickle can run code when it is opened. Here only torch's
weights-only loader opens it, which accepts only tensors and plain containers. With fake tensors it does not read data,
and records the offset of every storage.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from vlkv.errors import InputError
from vlkv.files import one_line

# safetensors' names of the supported dtypes -> the dtypes; and names of the dtypes -> safetensors' names.
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
NAMES = {np.dtype(kind).name: name for name, kind in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The location of one tensor."""

    file: Path
    key: str  # as written in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as BF16
    begin: int  # offset of its first byte in the file
    read_as: str | None = None  # the dtype to which it is cast when it is read; None: `dtype`

    @property
    def own_dtype(self) -> np.dtype:
        """The dtype after reading."""
        return np.dtype(DTYPES[self.read_as or self.dtype])

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first axis after reading."""
        return math.prod(self.shape[1:]) * self.own_dtype.itemsize


def headers(file: Path, pickled: bool) -> list[Tensor]:
    """The tensors of a file in the format safetensors, or, if `pickled`, of a file that torch has pickled."""
    if pickled and file.suffix != ".safetensors":
        return _pickled(file)
    try:
        with safe_open(file, framework="np") as opened:  # checks all offsets
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
            kinds = {key: (tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}
        with file.open("rb") as plain:
            length = int.from_bytes(plain.read(8), "little")
            header = json.loads(plain.read(length))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: truncated or corrupt safetensors ({error})") from None
    return [Tensor(file, key, *kinds[key], 8 + length + header[key]["data_offsets"][0]) for key in kinds]


def _pickled(file: Path) -> list[Tensor]:
    try:
        import torch  # noqa: PLC0415 (heavy, and only pickles need it)
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    except ImportError:
        raise InputError(f"{file}: pickle weights need torch: pip install 'vlkv[convert]'") from None
    if not zipfile.is_zipfile(file):
        raise InputError(f"{file}: damaged, or saved before torch 1.6; load and save it once with a newer torch")
    try:
        with FakeTensorMode():
            state = torch.load(file, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        what = asked[1] if asked else one_line(error)[:200]
        raise InputError(
            f"{file}: refused: the pickle contains more than tensors, which could run code: {what}"
        ) from None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise InputError(f"{file}: truncated or corrupt pickle weights ({one_line(error)[:200]})") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError(f"{file}: not a state dict: expected tensors by name")
    for key, tensor in state.items():
        if not tensor.is_contiguous():
            raise InputError(f"{file}: {key} is not contiguous; save it with safetensors first")
    return [Tensor(file, key, tuple(x.shape), *_place(x)) for key, x in state.items()]


def _place(tensor: Any) -> tuple[str, int]:
    """safetensors' name of the dtype of one of torch's tensors, and the offset of its first byte."""
    name = str(tensor.dtype).removeprefix("torch.")
    begin = tensor.untyped_storage()._checkpoint_offset
    return NAMES.get(name, name), begin + tensor.storage_offset() * tensor.itemsize


def read(tensor: Tensor) -> np.ndarray:
    """One whole tensor."""
    return next(read_rows(tensor, math.prod(tensor.shape[:1])))


def read_rows(tensor: Tensor, rows: int) -> Iterator[np.ndarray]:
    """One tensor in slices of `rows` entries of its first axis."""
    stored = np.dtype(DTYPES[tensor.dtype])
    row_bytes = math.prod(tensor.shape[1:]) * stored.itemsize
    # Not memory-mapped, because mapped files count as memory of the process while anything refers to them.
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.begin)
            for first in range(0, length := math.prod(tensor.shape[:1]), rows):
                count = min(rows, length - first)
                data = np.fromfile(file, np.uint8, count * row_bytes).view(stored)
                part = data.reshape((count, *tensor.shape[1:])[: len(tensor.shape)])
                yield cast(part, tensor.own_dtype, tensor.key)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{tensor.file}: cannot read {tensor.key}: {error}") from None


def cast(array: np.ndarray, dtype: np.dtype | None, key: str) -> np.ndarray:
    """The array in another dtype; InputError if a finite value overflows."""
    if dtype is None or array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not np.isfinite(result.astype(np.float32)).all() and np.isfinite(array.astype(np.float32)).all():
        raise InputError(f"{key} has values beyond {dtype.name}: use bfloat16 or float32")
    return result
