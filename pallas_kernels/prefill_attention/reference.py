"""The specification of prefill_attention: all pairs of tokens, masked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def prefill_attention_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    valid: Bool[Array, "B T"] | None,
    causal: bool,
    return_lse: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"] | None]:
    """Implements `prefill_attention` directly from its definition."""
    length, repeat = q.shape[1], q.shape[2] // k.shape[2]
    wide = [x.astype(jnp.float32) for x in (q, jnp.repeat(k, repeat, axis=2), jnp.repeat(v, repeat, axis=2))]
    logits = jnp.einsum("btnh,bsnh->bnts", *wide[:2], precision=jax.lax.Precision.HIGHEST) * q.shape[-1] ** -0.5
    allowed = jnp.tril(jnp.ones((length, length), bool)) if causal else jnp.ones((length, length), bool)
    if valid is not None:
        allowed = allowed & valid[:, None, None]
    logits = jnp.where(allowed, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1)
    out = jnp.einsum("bnts,bsnh->btnh", weights, wide[2], precision=jax.lax.Precision.HIGHEST).astype(q.dtype)
    return out, jax.nn.logsumexp(logits, axis=-1) if return_lse else None
