"""decode_attention in plain XLA: chunks of slots in a loop that ends with the longest segment, not with the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_CHUNK = 256


def decode_attention_xla(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P K H"],
    v: Float[Array, "B P K H"],
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """As `decode_attention` says, by an online softmax."""
    batch, heads, head_dim = q.shape
    slots, kv_heads = k.shape[1:3]
    chunk = min(_CHUNK, slots)
    q = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)

    def read(q, k, v, start, length, i):  # [G, H], [P, H], [P, H], scalars
        begin = start + i * chunk
        first = jnp.minimum(begin, slots - chunk)  # a slice must not run over the end of the pool
        place = first + jnp.arange(chunk)
        inside = (place >= begin) & (place < start + length)
        keys = jax.lax.dynamic_slice_in_dim(k, first, chunk)
        values = jax.lax.dynamic_slice_in_dim(v, first, chunk)
        logits = jnp.einsum("gh,ch->gc", q, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
        logits = jnp.where(inside, logits, -jnp.inf)
        peak = jnp.max(logits, axis=-1)
        p = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None])
        total = jnp.einsum("gc,ch->gh", p.astype(v.dtype), values, preferred_element_type=jnp.float32)
        return total, peak, jnp.sum(p, axis=-1)

    per_head = jax.vmap(read, in_axes=(0, 1, 1, 0, 0, None))
    per_row = jax.vmap(per_head, in_axes=(0, 0, 0, 0, 0, None))

    def step(i, state):
        total, peak, weight = state
        new_total, new_peak, new_weight = per_row(q, k, v, start, length, i)
        both = jnp.maximum(peak, new_peak)
        shift = jnp.where(jnp.isfinite(both), both, 0.0)
        old, new = jnp.exp(peak - shift), jnp.exp(new_peak - shift)
        return total * old[..., None] + new_total * new[..., None], both, weight * old + new_weight * new

    state = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]))
    if slots <= chunk:  # a short tail: no loop to compile
        total, peak, weight = step(0, state)
    else:
        total, peak, weight = jax.lax.fori_loop(0, -(-jnp.max(length) // chunk), step, state)
    out = total / jnp.where(weight > 0, weight, 1.0)[..., None]
    lse = jnp.where(weight > 0, peak + jnp.log(jnp.where(weight > 0, weight, 1.0)), -jnp.inf)
    return out.reshape(batch, heads, head_dim), lse.reshape(batch, heads)
