"""The bytes that bound the time of a decoding step."""

from __future__ import annotations

import math
from typing import Any

from vlkv.tools.benching.settings import tree_bytes


def step_bytes(params: Any, rows: int, entries: float) -> float:
    """Bytes that a decoding step must read: weights (one row of an untied embedding), and the entries of all layers.

    Args:
        params: the model.
        rows: of the batch.
        entries: of a row in each layer; a layer with a window has as many as the window at most. States are small, and
            are not counted.
    """
    c = params.config.decoder
    itemsize = params.decoder.embedding.weight[...].dtype.itemsize
    weights = tree_bytes(params.decoder)
    if params.decoder.head is not None:
        weights -= (c.vocab_size - 1) * c.width * itemsize
    kinds = [kind for kind in c.kinds if not kind.recurrent and not kind.shared]
    held = sum(min(entries, kind.window or entries) * math.prod(c.heads_of(kind)) for kind in kinds)
    return weights + 2 * rows * held * itemsize
