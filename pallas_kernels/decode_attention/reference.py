"""The specification of decode_attention: attention over all slots of the pool with a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.quantized import QuantizedPool, dequantize


def decode_attention_reference(
    q: Float[Array, "B N H"],
    k: Float[Array, "B #K P H"] | QuantizedPool,
    v: Float[Array, "B #K P H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """Implements `decode_attention` directly from its definition."""
    repeat = q.shape[1] // start.shape[1]
    q, k, v = (x.astype(jnp.float32) for x in (q, dequantize(k), dequantize(v)))
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    start, length = jnp.repeat(start, repeat, axis=1), jnp.repeat(length, repeat, axis=1)
    logits = jnp.einsum("bnh,bnph->bnp", q, k, precision=jax.lax.Precision.HIGHEST) / jnp.sqrt(q.shape[-1])
    place = jnp.arange(k.shape[2]) - start[..., None]  # within the segment
    inside = (place >= 0) & (place < length[..., None])
    if valid is not None:
        chosen = jnp.take_along_axis(jnp.repeat(valid, repeat, axis=1), jnp.clip(place, 0, max_length - 1), axis=-1)
        inside = inside & chosen
    lse = jax.nn.logsumexp(jnp.where(inside, logits, -jnp.inf), axis=-1)
    p = jnp.where(inside, jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)
    out = jnp.einsum("bnp,bnph->bnh", p, v, precision=jax.lax.Precision.HIGHEST)
    if not return_mass:
        return out, lse, None
    slot = jnp.minimum(start[..., None] + jnp.arange(max_length), k.shape[2] - 1)
    mass = jnp.where(jnp.arange(max_length) < length[..., None], jnp.take_along_axis(p, slot, axis=-1), 0.0)
    return out, lse, mass
