"""The specification of attention_mass_rows: the whole [T, S] matrix in float32. For tests, not for long prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention_mass_rows_reference(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    key_weight: Float[Array, "R S"],
    key_mask: Bool[Array, " S"],
    row_place: Int[Array, " T"],
    *,
    causal: bool,
    in_order: bool,
    softmax_n: float,
) -> Float[Array, "R N T"]:
    """Implements `attention_mass_rows` directly from its definition."""
    del in_order
    q, k = q.astype(jnp.float32), jnp.repeat(k.astype(jnp.float32), q.shape[0] // k.shape[0], axis=0)
    logits = jnp.einsum("nth,nsh->nts", q, k, precision=jax.lax.Precision.HIGHEST) / jnp.sqrt(q.shape[-1])
    allowed = key_mask & (jnp.arange(k.shape[1]) <= row_place[:, None]) if causal else key_mask[None]
    peak = jnp.max(jnp.where(allowed, logits, -jnp.inf), axis=-1, keepdims=True)
    peak = jnp.maximum(peak, 0.0) if softmax_n else jnp.where(jnp.isfinite(peak), peak, 0.0)
    exponent = jnp.where(allowed, jnp.exp(logits - peak), 0.0)
    total = softmax_n * jnp.exp(-peak) + jnp.sum(exponent, axis=-1, keepdims=True)
    p = exponent / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("rs,nts->rnt", key_weight, p, precision=jax.lax.Precision.HIGHEST)
