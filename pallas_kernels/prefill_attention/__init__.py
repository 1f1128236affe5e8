"""prefill_attention: attention of all tokens of a prompt, without a T x T matrix.

Axes: B batch · T tokens · N query heads · K key heads · G = N/K · H head dim.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import platforms, require_shapes, run
from pallas_kernels.prefill_attention.reference import Attended, PrefillArguments, Statistic


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    valid: Bool[Array, "B T"] | None = None,
    place: Int[Array, "B T"] | None = None,
    until: Int[Array, "B T"] | None = None,
    ahead: int = 0,
    causal: bool = True,
    window: int | None = None,
    return_lse: bool = False,
    row_weight: Float[Array, "B R T"] | None = None,
    statistics: tuple[tuple[Statistic, float], ...] = (),
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | Attended:
    """Computes softmax(q k^T / sqrt(H)) v over valid keys, accumulated in float32; head n uses key head n // G.

    Args:
        q: queries.
        k: keys.
        v: values.
        valid: which tokens exist; None: all. A query without any allowed key gets an arbitrary finite result.
        place: number of each token, for `window`; it grows by at least 1 from one valid token of a row to the next, and
            there is no padding between them. None: its index.
        until: with `causal`, index of the last key that each query may attend to, for images whose tokens attend to
            each other in both directions. None: its own index.
        ahead: with `until`, the most that `until` exceeds a query's own index. It bounds the work.
        causal: each query attends to keys up to its own index, so rows may be padded on either side.
        window: with `causal`, each query attends only to keys whose place is less than `window` before its own.
        return_lse: whether to return the log of each query's denominator too; `attention_mass` can use it.
        row_weight: weights of the queries for R results of `attention_mass`, if `gives_mass`; 0 for padding.
        statistics: `statistic` and `threshold` of each of the R results, as in `attention_mass`.
        implementation: a name from `dispatch.available`; None chooses one for the platform.

    Returns:
        The attention, or `Attended` with `return_lse` or `row_weight`. Then `lse` is log(sum(exp(q k^T / sqrt(H)))) of
        each query in float32; it is +inf for padding, so that the probabilities there are 0. `mass` is what each key
        receives, in float32. What was not asked for is None.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    _check(q, k, v, causal, window, until)
    batch, length, _, _ = q.shape
    each, weights = ("B, T", (batch, length)), ("B, R, T", (batch, len(statistics), length))
    arrays = {"valid": (valid, *each), "place": (place, *each), "until": (until, *each)}
    require_shapes("prefill_attention", **arrays, row_weight=(row_weight, *weights))
    if row_weight is not None and not gives_mass(implementation):
        raise ValueError(f"prefill_attention: implementation {implementation!r} cannot compute the mass here; xla can")
    if window is None or (place is None and window >= length):
        window = place = None
    args = PrefillArguments(
        q, k, v, valid, causal, return_lse, place, window, until, 0 if until is None else ahead, row_weight, statistics
    )
    part = run("prefill_attention", args, implementation)
    if part.lse is not None and valid is not None:
        part = part._replace(lse=jnp.where(valid[:, None], part.lse, jnp.inf))
    return part if return_lse or row_weight is not None else part.out


def _check(q: Any, k: Any, v: Any, causal: bool, window: int | None, until: Any) -> None:
    batch, length, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[:2] != (batch, length) or k.shape[3] != head_dim or heads % k.shape[2]:
        expected = "expected [B, T, N, H] and twice [B, T, K, H] with K dividing N"
        raise ValueError(f"prefill_attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit: {expected}")
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"prefill_attention: window={window} must be at least 1, and attention causal")
    if until is not None and not causal:
        raise ValueError("prefill_attention: until is given, so make attention causal")


def gives_mass(implementation: str | None) -> bool:
    """Whether `row_weight` can be given, on all platforms that the program may be compiled for."""
    if implementation is None:
        return platforms() == ("cpu",)
    return implementation in ("xla", "reference")
