"""attention_mass_rows: the weighted sum of attention that every query row gives, without a T x T matrix.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass_rows.reference import MassRowsArguments, attention_mass_rows_reference
from pallas_kernels.attention_mass_rows.xla import attention_mass_rows_xla
from pallas_kernels.dispatch import Kernel, choose

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": attention_mass_rows_xla,
    "reference": attention_mass_rows_reference,
    "mosaic_tpu": Kernel("attention_mass_rows", "mosaic_tpu"),
    "triton": Kernel("attention_mass_rows", "triton"),
}


def attention_mass_rows(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    *,
    key_weight: Float[Array, "R S"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"] | None = None,
    causal: bool = True,
    softmax_n: float = 0.0,
    implementation: str | None = None,
) -> Float[Array, "R N T"]:
    """Computes softmax_n(q k^T / sqrt(H)) @ key_weight^T over the allowed keys, in float32 and O(T) memory.

    softmax_n(x)_j = exp(x_j) / (softmax_n + sum_i exp(x_i)). A row without any allowed key gives 0.

    Args:
        q: query rows, either all rows of the prompt or a few gathered ones; head n uses key head n // G.
        k: keys.
        key_weight: weight of each key, one line per weighting.
        key_mask: which keys exist; applies to all rows.
        row_place: index of each row among the keys, used for causality; None: row t has index t.
        causal: each row attends only to keys up to its own index.
        softmax_n: constant added to the denominator (CSP, Eq. 7).
        implementation: a name from `dispatch.available`; None chooses one for the platform.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    heads, rows, _ = q.shape
    kv_heads, keys, _ = k.shape
    if heads % kv_heads or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention_mass_rows: q {q.shape} and k {k.shape}: heads must divide, head dims agree")
    if key_weight.shape[1:] != (keys,) or key_mask.shape != (keys,):
        raise ValueError(f"attention_mass_rows: key_weight {key_weight.shape} and key_mask {key_mask.shape} do not "
                         f"fit {keys} keys")  # fmt: skip
    if row_place is None and causal and rows != keys:
        raise ValueError(f"attention_mass_rows: {rows} rows on {keys} keys need row_place to be causal")
    places = jnp.arange(rows) if row_place is None else row_place
    run = choose("attention_mass_rows", _IMPLEMENTATIONS, implementation, "xla")
    args = MassRowsArguments(
        q=q, k=k, key_mask=key_mask, row_place=places, causal=causal, in_order=row_place is None, softmax_n=softmax_n,
        key_weight=key_weight,
    )  # fmt: skip
    return run(args)
