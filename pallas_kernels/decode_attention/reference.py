"""The specification of decode_attention: every slot, masked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def decode_attention_reference(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P K H"],
    v: Float[Array, "B P K H"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """As `decode_attention` says, read off the definition."""
    repeat = q.shape[1] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = jnp.repeat(k, repeat, axis=2), jnp.repeat(v, repeat, axis=2)
    start, length = jnp.repeat(start, repeat, axis=1), jnp.repeat(length, repeat, axis=1)
    logits = jnp.einsum("bnh,bpnh->bnp", q, k, precision=jax.lax.Precision.HIGHEST) / jnp.sqrt(q.shape[-1])
    slots = jnp.arange(k.shape[1])
    inside = (slots >= start[..., None]) & (slots < (start + length)[..., None])
    lse = jax.nn.logsumexp(jnp.where(inside, logits, -jnp.inf), axis=-1)
    p = jnp.where(inside, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)
    return jnp.einsum("bnp,bpnh->bnh", p, v, precision=jax.lax.Precision.HIGHEST), lse
