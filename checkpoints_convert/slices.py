"""Writes safetensors files in slices, so that memory does not depend on the size of a tensor or a file.

The format: the length of a JSON header (8 bytes, little endian), the header, the bytes of the tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.checkpoint import Checkpoint
from checkpoints_convert.tensors import NAMES, cast

SLICE_BYTES = 2**24


def write(
    checkpoint: Checkpoint, keys: list[str], file: Path, dtype: np.dtype | None, done: Callable[[], Any]
) -> tuple[str, int]:
    """Writes some tensors of a checkpoint into one file.

    Args:
        checkpoint: the source.
        keys: the tensors.
        file: the file, which is overwritten.
        dtype: of all tensors; None: that of each tensor.
        done: called after every tensor.

    Returns:
        The file's SHA-256, and the bytes of its tensors.
    """
    kinds = {key: dtype or checkpoint.tensors[key].own_dtype for key in keys}
    # Wide types first, so that the offset of every tensor is a multiple of its item size.
    order = sorted(keys, key=lambda key: -kinds[key].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        shape = checkpoint.tensors[key].shape
        begin, end = end, end + math.prod(shape) * kinds[key].itemsize
        header[key] = {"dtype": NAMES[kinds[key].name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with file.open("wb") as out:

        def put(part: bytes | memoryview) -> None:
            out.write(part)
            digest.update(part)

        put(len(text).to_bytes(8, "little") + text)
        for key in order:
            for part in checkpoint.slices(key, SLICE_BYTES):
                made = np.ascontiguousarray(cast(part, kinds[key], key))
                put(made.reshape(-1).view(np.uint8).data)
            done()
    return digest.hexdigest(), end
