"""decode_attention: one query per row against its own contiguous segment of the packed pool. core_attention: against a
list of slots of this segment and the text after them (A-VL's operator).

The pool has K columns, one per key head; or one column, which contains the segments of all heads, one after another
(`#K` in the shapes below: K or 1).

Axes: B batch · N query heads · K key heads · G = N/K · P pool slots · C bound on the listed slots ·
M bound on a segment · H head dim.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.decode_attention.reference import DecodeArguments, Listed
from pallas_kernels.denominator import finish, normalized, with_constant
from pallas_kernels.dispatch import platforms, require_shapes, run
from pallas_kernels.quantized import Quantized


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
    _check_shapes("decode_attention", q, k, v, start, length)
    most = k.shape[2] if max_length is None else max_length
    require_shapes("decode_attention", valid=(valid, "B, K, M", (*start.shape, most)))
    args = DecodeArguments(q, k, v, start, length, valid, most, return_mass)
    out, lse, mass = run("decode_attention", args, implementation)
    return finish(out, lse, mass, softmax_n)


def core_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | Quantized,
    v: Float[Array, "B #K P H"] | Quantized,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    offsets: Int[Array, "B C"],
    count: Int[Array, " B"],
    text: Int[Array, "B K"],
    *,
    valid: Bool[Array, "B K M"] | None = None,
    max_length: int | None = None,
    softmax_n: float = 0.0,
    return_mass: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N ..."], ...]:
    """`decode_attention` over slots start + offsets[i] for i < count, and over start + j for text <= j < length.

    Other slots of the segment have no influence, as long as they hold finite numbers. Whether they are read depends on
    the implementation.

    Args:
        q, k, v, start, length: see `decode_attention`.
        offsets: listed slots as offsets from `start`: ascending, below `text`, the same for all heads.
        count: how many entries of `offsets` are used; the others may hold anything.
        text: offset from `start` of the first text slot; all slots from there on take part.
        valid: which slots of the segment may take part, by offset from `start`; None: all used slots.
        max_length, softmax_n, return_mass, implementation: see `decode_attention`.

    Returns:
        The same as `decode_attention`.

    Raises:
        ValueError: the shapes do not fit, or the implementation is not available.
    """
    _check_shapes("core_attention", q, k, v, start, length)
    batch, most = q.shape[0], k.shape[2] if max_length is None else max_length
    if offsets.ndim != 2 or offsets.shape[0] != batch or count.shape != (batch,):
        fit = f"must be [B, C] and [B] with B = {batch}"
        raise ValueError(f"core_attention: offsets {offsets.shape} and count {count.shape} {fit}")
    require_shapes("core_attention", text=(text, "B, K", start.shape), valid=(valid, "B, K, M", (*start.shape, most)))
    args = DecodeArguments(q, k, v, start, length, valid, most, return_mass, Listed(offsets, count, text))
    out, lse, mass = run("core_attention", args, implementation)
    return finish(out, lse, mass, softmax_n)


def reads_tiles(k: Float[Array, "B #K P H"] | Quantized, implementation: str | None) -> bool:
    """Whether `core_attention` reads whole tiles of slots, so that it reads less if the listed slots share tiles.

    It does so on a TPU. `swap_slots` brings the slots of a pool together there if the head dim fills the lanes.
    """
    on_tpu = "tpu" in platforms() if implementation is None else implementation.startswith("mosaic_tpu")
    return on_tpu and not isinstance(k, Quantized) and k.shape[3] % 128 == 0


def _check_shapes(op: str, q: Any, k: Any, v: Any, start: Any, length: Any) -> None:
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
