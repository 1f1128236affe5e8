"""prefill_attention: every query of a prompt against all keys it may see, never a T x T matrix.

Axes: B batch · T tokens · N query heads · K key heads · G = N/K · H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import Kernel, choose
from pallas_kernels.prefill_attention.reference import prefill_attention_reference
from pallas_kernels.prefill_attention.xla import prefill_attention_xla

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": prefill_attention_xla,
    "reference": prefill_attention_reference,
    "mosaic_tpu": Kernel("prefill_attention", "mosaic_tpu"),
}


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    valid: Bool[Array, "B T"] | None = None,
    causal: bool = True,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v over valid keys, accumulated in float32, head n reading key head n // G.

    Args:
        q: queries.
        k: keys.
        v: values.
        valid: which tokens exist; None: all. A query that may see none gets something finite, whatever it is.
        causal: a query sees keys up to its own place in the row, so rows may be padded on either side.
        implementation: a name that `dispatch.available` gives; None chooses.

    Raises:
        ValueError: shapes that do not fit, or an implementation that is not there.
    """
    batch, length, heads, head_dim = q.shape
    if k.shape != v.shape or k.shape[:2] != (batch, length) or k.shape[3] != head_dim or heads % k.shape[2]:
        raise ValueError(f"prefill_attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit: expected "
                         "[B, T, N, H] and twice [B, T, K, H] with K dividing N")  # fmt: skip
    if valid is not None and valid.shape != (batch, length):
        raise ValueError(f"prefill_attention: valid {valid.shape} must be [B, T] = {(batch, length)}")
    run = choose("prefill_attention", _IMPLEMENTATIONS, implementation, "xla")
    return run(q, k, v, valid, causal)
