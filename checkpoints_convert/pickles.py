"""Finds the offset of each tensor in weights pickled by torch. Needs torch, but no memory for the weights.

A pickle can run code when it is opened. Here only torch's weights-only loader opens it, which accepts only tensors and
plain containers. With fake tensors it does not read data, and records the offset of every storage.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

from vlkv.errors import InputError
from vlkv.files import one_line


def headers(file: Path) -> list[tuple[str, tuple[int, ...], str, int]]:
    """For every tensor of a state dict: key, shape, name of its dtype, and offset of its first byte.

    Raises:
        InputError: torch is missing, the pickle contains more than tensors, or the file is damaged or older than torch
            1.6.
    """
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
    return [(key, *_place(file, key, tensor)) for key, tensor in state.items()]


def _place(file: Path, key: str, tensor: Any) -> tuple[tuple[int, ...], str, int]:
    if not tensor.is_contiguous():
        raise InputError(f"{file}: {key} is not contiguous; save it with safetensors first")
    name = str(tensor.dtype).removeprefix("torch.")
    begin = tensor.untyped_storage()._checkpoint_offset
    return tuple(tensor.shape), name, begin + tensor.storage_offset() * tensor.itemsize
