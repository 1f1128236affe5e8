"""decode_attention in plain XLA: chunks of slots in a loop that ends with the longest segment, not with the pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import quantized
from pallas_kernels.quantized import QuantizedPool

_CHUNK = 256


def decode_attention_xla(
    q: Float[Array, "B N H"],
    k: Float[Array, "B P K H"] | QuantizedPool,
    v: Float[Array, "B P K H"] | QuantizedPool,
    start: Int[Array, "B K"],
    length: Int[Array, "B K"],
    valid: Bool[Array, "B K M"] | None,
    max_length: int,
    return_mass: bool,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"], Float[Array, "B N M"] | None]:
    """As `decode_attention` says, by an online softmax; the mass from the logits of all chunks, at the end."""
    batch, heads, head_dim = q.shape
    slots, kv_heads = k.shape[1:3]
    chunk = min(_CHUNK, slots)
    q = q.reshape(batch, kv_heads, heads // kv_heads, head_dim)

    def read(q, k, v, start, length, valid, i):  # [G, H], [P, H], [P, H], scalars, [M]
        begin = start + i * chunk
        first = jnp.minimum(begin, slots - chunk)  # a slice must not run over the end of the pool
        place = first - start + jnp.arange(chunk)  # within the segment
        inside = (place >= i * chunk) & (place < length)
        if valid is not None:
            inside = inside & jnp.take(valid, place, mode="fill", fill_value=False)
        keys, values = quantized.read(k, first, chunk), quantized.read(v, first, chunk)
        logits = jnp.einsum("gh,ch->gc", q, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
        logits = jnp.where(inside, logits, -jnp.inf)
        peak = jnp.max(logits, axis=-1)
        p = jnp.exp(logits - jnp.where(jnp.isfinite(peak), peak, 0.0)[:, None])
        total = jnp.einsum("gc,ch->gh", p.astype(v.dtype), values, preferred_element_type=jnp.float32)
        # What the slice began too early comes round to the end, where it is masked.
        seen = jnp.roll(logits, first - begin, axis=-1) if return_mass else None
        return total, peak, jnp.sum(p, axis=-1), seen

    per_head = jax.vmap(read, in_axes=(0, 1, 1, 0, 0, None if valid is None else 0, None))
    per_row = jax.vmap(per_head, in_axes=(0, 0, 0, 0, 0, None if valid is None else 0, None))

    def step(i, state):
        total, peak, weight, seen = state
        new_total, new_peak, new_weight, logits = per_row(q, k, v, start, length, valid, i)
        both = jnp.maximum(peak, new_peak)
        shift = jnp.where(jnp.isfinite(both), both, 0.0)
        old, new = jnp.exp(peak - shift), jnp.exp(new_peak - shift)
        if return_mass:
            seen = jax.lax.dynamic_update_slice_in_dim(seen, logits, i * chunk, axis=-1)
        return total * old[..., None] + new_total * new[..., None], both, weight * old + new_weight * new, seen

    room = -(-max_length // chunk) * chunk
    seen = jnp.full((*q.shape[:3], room), -jnp.inf) if return_mass else None
    state = (jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), seen)
    if slots <= chunk:  # a short tail: no loop to compile
        total, peak, weight, seen = step(0, state)
    else:
        total, peak, weight, seen = jax.lax.fori_loop(0, -(-jnp.max(length) // chunk), step, state)
    out = total / jnp.where(weight > 0, weight, 1.0)[..., None]
    lse = jnp.where(weight > 0, peak + jnp.log(jnp.where(weight > 0, weight, 1.0)), -jnp.inf)
    mass = None
    if seen is not None:
        mass = jnp.exp(seen[..., :max_length] - jnp.where(weight > 0, lse, 0.0)[..., None])
        mass = mass.reshape(batch, heads, max_length)
    return out.reshape(batch, heads, head_dim), lse.reshape(batch, heads), mass
