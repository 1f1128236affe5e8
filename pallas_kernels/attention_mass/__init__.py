"""attention_mass: the weighted sum of attention that every key receives, without a T x T matrix.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass.reference import MassArguments, Statistic, attention_mass_reference
from pallas_kernels.attention_mass.xla import attention_mass_xla
from pallas_kernels.dispatch import Kernel, choose, platforms

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": attention_mass_xla,
    "reference": attention_mass_reference,
    "mosaic_tpu": Kernel("attention_mass", "mosaic_tpu"),
    "triton": Kernel("attention_mass", "triton"),
}


def attention_mass(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    *,
    row_weight: Float[Array, "R T"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"] | None = None,
    causal: bool = True,
    softmax_n: float = 0.0,
    statistic: Statistic = "sum",
    threshold: float = 0.01,
    lse: Float[Array, "N T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "R N S"]:
    """Computes row_weight @ f(softmax_n(q k^T / sqrt(H))) over the allowed keys, in float32 and O(S) memory.

    softmax_n(x)_j = exp(x_j) / (softmax_n + sum_i exp(x_i)). A row without any allowed key contributes nothing.

    Args:
        q: query rows, either all rows of the prompt or a few gathered ones; head n uses key head n // G.
        k: keys.
        row_weight: weight of each row, one line per weighting; weight 0 excludes a row.
        key_mask: which keys exist; applies to all rows.
        row_place: index of each row among the keys, used for causality; None: row t has index t.
        causal: each row attends only to keys up to its own index.
        softmax_n: constant added to the denominator (CSP, Eq. 7).
        statistic: f: "sum" is the probability p, "square" its square, "entropy" is -p log(p), and "count" is 1 where
            the probability is at least `threshold` times the largest one of the row, else 0.
        threshold: for the statistic "count" (VL-Cache).
        lse: log(sum_i exp(x_i)) of each row over its allowed keys, as `prefill_attention` returns it. Implementations
            that would need an extra pass to compute it (`takes_lse`) skip that pass. None: compute it.
        implementation: a name from `dispatch.available`; None chooses one for the platform.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    heads, rows, _ = q.shape
    kv_heads, keys, _ = k.shape
    if heads % kv_heads or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention_mass: q {q.shape} and k {k.shape}: heads must divide, head dims agree")
    if row_weight.shape[1:] != (rows,) or key_mask.shape != (keys,):
        raise ValueError(f"attention_mass: row_weight {row_weight.shape} and key_mask {key_mask.shape} do not fit "
                         f"{rows} rows and {keys} keys")  # fmt: skip
    if lse is not None and lse.shape != (heads, rows):
        raise ValueError(f"attention_mass: lse {lse.shape} must be [N, T] = {(heads, rows)}")
    if row_place is None and causal and rows != keys:
        raise ValueError(f"attention_mass: {rows} rows on {keys} keys need row_place to be causal")
    places = jnp.arange(rows) if row_place is None else row_place
    run = choose("attention_mass", _IMPLEMENTATIONS, implementation, "xla")
    args = MassArguments(
        q=q, k=k, key_mask=key_mask, row_place=places, causal=causal, in_order=row_place is None, softmax_n=softmax_n,
        row_weight=row_weight, statistic=statistic, threshold=threshold, lse=lse,
    )  # fmt: skip
    return run(args)


def takes_lse(implementation: str | None) -> bool:
    """Whether passing `lse` to `attention_mass` saves work on a platform that the program may be compiled for."""
    if implementation is None:
        return bool({"gpu", "cpu"} & set(platforms()))
    return implementation == "xla" or implementation.startswith("triton")
