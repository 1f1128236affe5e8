"""decode_attention: one query per row against its own contiguous segment of the packed pool.

The pool has K columns, one per key head; or one column, which contains the segments of all heads, one after another
(`#K` in the shapes below: K or 1).

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · M bound on a segment · H head dim.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.reference import DecodeArguments
from pallas_kernels.denominator import finish, normalized, with_constant
from pallas_kernels.dispatch import choose, implementations, require_shapes
from pallas_kernels.quantized import Quantized

_IMPLEMENTATIONS = implementations("decode_attention", "mosaic_tpu", "triton")


def decode_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | Quantized,
    v: Float[Array, "B #K P H"] | Quantized,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    *,
    valid: Bool[Array, "B K M"] | None = None,
    max_length: int | None = None,
    softmax_n: float = 0.0,
    return_mass: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N ..."], ...]:
    """Computes softmax_n(q k^T / sqrt(H)) v over slots start <= p < start + length; head n uses key head n // G.

    softmax_n(x)_j = exp(x_j) / (softmax_n + sum_i exp(x_i)).

    Args:
        q: one query per row.
        k: keys of the pool; a quantised pool is dequantised one block at a time. XLA reads every kind; no Pallas kernel
            reads one that is quantised.
        v: values of the pool, likewise.
        start: first slot of the segment.
        length: number of used slots of the segment.
        valid: which slots of the segment take part, by offset from `start`; None: all used slots.
        max_length: M, a static bound on `length`; None: P.
        softmax_n: constant added to the denominator (CSP, Eq. 7); must be 0 if the result goes to `combine`.
        return_mass: whether to return the probabilities too, by offset from `start`.
        implementation: a name from `dispatch.available`; None chooses one for the platform.

    Returns:
        The attention output in float32, the log of the softmax denominator (`combine` needs it), and with
        `return_mass` the probabilities. An empty segment gives zeros and log(softmax_n), which is -inf for 0.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    check_shapes("decode_attention", q, k, v, start, length)
    most = k.shape[2] if max_length is None else max_length
    require_shapes("decode_attention", valid=(valid, "B, K, M", (*start.shape, most)))
    run = choose("decode_attention", _IMPLEMENTATIONS, implementation, "xla")
    out, lse, mass = run(DecodeArguments(q, k, v, start, length, valid, most, return_mass))
    return finish(out, lse, mass, softmax_n)


def check_shapes(op: str, q: Any, k: Any, v: Any, start: Any, length: Any) -> None:
    """Raises ValueError unless the shapes of queries, pool and segments fit."""
    batch, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim or heads % k.shape[1]:
        expected = "expected [B, N, H] and twice [B, K, P, H] or [B, 1, P, H] with K dividing N"
        raise ValueError(f"{op}: q {q.shape}, k {k.shape} and v {v.shape} do not fit: {expected}")
    kv_heads = start.shape[-1] if k.shape[1] == 1 else k.shape[1]
    if start.shape != (batch, kv_heads) or length.shape != start.shape or heads % kv_heads:
        raise ValueError(f"{op}: start {start.shape} and length {length.shape} must be [B, K] = {(batch, kv_heads)}")


def combine(
    first: tuple[Float[Array, "B N ..."], ...],
    second: tuple[Float[Array, "B N ..."], ...],
    softmax_n: float = 0.0,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attention over the union of two disjoint sets of keys, from the attention over each; either may be empty.

    Args:
        first: attention and log of the denominator, as `decode_attention` returns them with softmax_n = 0.
        second: the same for the other keys.
        softmax_n: constant added to the joint denominator (CSP, Eq. 7). Leave it 0 if the result is combined again.

    Returns:
        The attention and the log of the joint denominator, which includes softmax_n.
    """
    (a, lse_a), (b, lse_b) = first, second
    peak = jnp.maximum(lse_a, lse_b)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = a * weights[0][..., None] + b * weights[1][..., None]
    return with_constant(*normalized(total, peak, weights[0] + weights[1]), softmax_n)
