"""attention_mass: how much weighted attention every key receives, without a T x T matrix.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass.reference import attention_mass_reference
from pallas_kernels.attention_mass.xla import attention_mass_xla
from pallas_kernels.dispatch import Kernel, choose, platforms

Statistic = Literal["sum", "square", "count"]
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
    """row_weight @ f(softmax_n(q k^T / sqrt(H))) over the allowed keys, in float32 and O(S) memory.

    softmax_n(x)_j = exp(x_j) / (softmax_n + sum_i exp(x_i)); a row that may see no key contributes nothing.

    Args:
        q: query rows, all of them or a few gathered ones; head n reads key head n // G.
        k: keys.
        row_weight: what each row counts, one line per weighting; 0 leaves a row out.
        key_mask: which keys exist for all rows.
        row_place: where each row stands among the keys, for causality; None: row t at place t.
        causal: a row sees keys up to its own place.
        softmax_n: the constant added to the denominator (CSP, Eq. 7).
        statistic: f: the probability, its square, or 1 where it is >= threshold x the row's largest.
        threshold: of the statistic "count" (VL-Cache).
        lse: log(sum_i exp(x_i)) of each row over the keys that it may see, as `prefill_attention` returns it; None: not
            known. An implementation that makes a pass over all keys for it (`takes_lse`) leaves that pass out.
        implementation: a name that `dispatch.available` gives; None chooses.

    Raises:
        ValueError: shapes that do not fit, or an implementation that is not there.
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
    return run(
        q, k, row_weight, key_mask, places, causal=causal, in_order=row_place is None, softmax_n=softmax_n,
        statistic=statistic, threshold=threshold, lse=lse,
    )  # fmt: skip


def takes_lse(implementation: str | None) -> bool:
    """Whether `attention_mass` gains from being given `lse`, on a platform that it may be compiled for here."""
    return "gpu" in platforms() if implementation is None else implementation.startswith("triton")
