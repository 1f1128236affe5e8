"""prefill_attention: every query of a prompt against all keys it may see, never a T x T matrix.

Axes: B batch · T tokens · N query heads · K key heads · G = N/K · H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import Kernel, choose
from pallas_kernels.prefill_attention.reference import prefill_attention_reference
from pallas_kernels.prefill_attention.xla import prefill_attention_xla

_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": prefill_attention_xla,
    "reference": prefill_attention_reference,
    "mosaic_tpu": Kernel("prefill_attention", "mosaic_tpu"),
    "cudnn": Kernel("prefill_attention", "cudnn"),
}


@overload
def prefill_attention(
    q: Any, k: Any, v: Any, *, valid: Any = None, causal: bool = True, return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def prefill_attention(
    q: Any, k: Any, v: Any, *, valid: Any = None, causal: bool = True, return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def prefill_attention(
    q: Any, k: Any, v: Any, *, valid: Any = None, causal: bool = True, return_lse: bool,
    implementation: str | None = None,
) -> Any: ...  # fmt: skip


def prefill_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    valid: Bool[Array, "B T"] | None = None,
    causal: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """softmax(q k^T / sqrt(H)) v over valid keys, accumulated in float32, head n reading key head n // G.

    Args:
        q: queries.
        k: keys.
        v: values.
        valid: which tokens exist; None: all. A query that may see none gets something finite, whatever it is.
        causal: a query sees keys up to its own place in the row, so rows may be padded on either side.
        return_lse: whether to return the log of each query's denominator too, from which `attention_mass` can start.
        implementation: a name that `dispatch.available` gives; None chooses.

    Returns:
        The attention. With `return_lse` also log(sum(exp(q k^T / sqrt(H)))) of each query in float32, which is +inf for
        a token that does not exist, so that its probabilities are 0.

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
    out, lse = run(q, k, v, valid, causal, return_lse)
    if lse is None:
        return out
    return out, lse if valid is None else jnp.where(valid[:, None], lse, jnp.inf)
