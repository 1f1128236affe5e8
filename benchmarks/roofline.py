"""The least time of prefill and of a decoding step on a device, from its measured limits.

Axes: B batch · T prompt · L layers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vlkv.analysis import cost
from vlkv.tools.benching.settings import Setting, tree_bytes


def shares(params: Any, setting: Setting, row: dict[str, Any], *, bandwidth: float, product: float) -> dict[str, float]:
    """The share of the device's limits that prefill and decoding reach: 1 is the limit.

    Args:
        params: the model.
        setting: batch and lengths that were measured.
        row: a row of `vlkv.tools.benching.measuring.measure`.
        bandwidth: bytes per second (read plus written) of a copy.
        product: operations per second of bfloat16 matrix products.
    """
    c = params.config.decoder
    per_layer = cost.prefill_flops(c, np.full(c.layers, setting.prompt))
    operations = setting.batch * (float(per_layer.sum()) + cost.logits_flops(c, 1))
    moved = step_bytes(params, setting.batch, row["kept_per_layer"] + setting.new / 2)
    return {
        "prefill_roofline_share": round(operations / product / row["prefill_seconds"], 4),
        "decode_roofline_share": round(moved / bandwidth / row["step_seconds"], 4),
        "step_bytes": moved,
    }


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
