"""attention_mass: the weighted sum of attention that every key receives, without a T x T matrix; and
attention_mass_rows: that which every query row gives.

Axes: R weightings · T query rows · S keys · N query heads · K key heads · G = N/K · H head dim.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention_mass.reference import MassArguments, MassRowsArguments, Statistic
from pallas_kernels.dispatch import platforms, require_shapes, run


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
    rows = _row_arguments("attention_mass", q, k, key_mask, row_place, causal, softmax_n)
    heads, count, _ = q.shape
    require_shapes(
        "attention_mass",
        row_weight=(row_weight, "R, T", (row_weight.shape[0], count)),
        lse=(lse, "N, T", (heads, count)),
    )
    args = MassArguments(**rows, row_weight=row_weight, statistic=statistic, threshold=threshold, lse=lse)
    return run("attention_mass", args, implementation)


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

    A row without any allowed key gives 0. The arguments are those of `attention_mass`, with `key_weight`, the weight of
    each key, one line per weighting, in place of `row_weight`.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    rows = _row_arguments("attention_mass_rows", q, k, key_mask, row_place, causal, softmax_n)
    weights = key_weight, "R, S", (key_weight.shape[0], k.shape[1])
    require_shapes("attention_mass_rows", key_weight=weights)
    return run("attention_mass_rows", MassRowsArguments(**rows, key_weight=key_weight), implementation)


def _row_arguments(op: str, q: Any, k: Any, key_mask: Any, row_place: Any, causal: bool, softmax_n: float) -> Any:
    """The fields of `RowArguments`, which `attention_mass` and `attention_mass_rows` share; checks their shapes."""
    (heads, rows, head_dim), (kv_heads, keys, _) = q.shape, k.shape
    if heads % kv_heads or head_dim != k.shape[-1]:
        raise ValueError(f"{op}: q {q.shape} and k {k.shape}: heads must divide, head dims agree")
    require_shapes(op, key_mask=(key_mask, "S", (keys,)))
    if row_place is None and causal and rows != keys:
        raise ValueError(f"{op}: {rows} rows on {keys} keys need row_place to be causal")
    places = jnp.arange(rows) if row_place is None else row_place
    return {
        "q": q,
        "k": k,
        "key_mask": key_mask,
        "row_place": places,
        "causal": causal,
        "in_order": row_place is None,
        "softmax_n": softmax_n,
    }


def takes_lse(implementation: str | None) -> bool:
    """Whether passing `lse` to `attention_mass` saves work on a platform that the program may be compiled for."""
    if implementation is None:
        return bool({"gpu", "cpu"} & set(platforms()))
    return implementation == "xla" or implementation.startswith("triton")
