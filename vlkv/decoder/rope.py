"""Rotary position embedding, the half-split convention of Llama (Su et al. 2021, Eq. 34), and its relatives.

M-RoPE (Qwen2-VL, Sec. 2.1) lets channel pairs turn by time, line or column; long-RoPE (Phi-3) divides frequencies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.config import RopeConfig


def table(positions: Int[Array, "B T A"], head_dim: int, rope: RopeConfig) -> Float[Array, "B T 1 _H"]:
    """What turns channel pairs (i, i + H/2) by position * theta^(-2i/H), in all heads and layers alike."""
    half = head_dim // 2
    frequency = rope.theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if rope.short is not None:
        longest = jnp.max(positions, axis=(1, 2), keepdims=True) + 1  # of each row: rows must not meddle
        factors = jnp.where(longest > rope.original, jnp.asarray(rope.long), jnp.asarray(rope.short))
        frequency = frequency / factors  # [B, 1, H/2]
    turned = positions.astype(jnp.float32)
    if rope.sections is not None:
        turned = turned[..., np.repeat(np.arange(len(rope.sections)), rope.sections)]  # [B, T, H/2]
    return cosines_and_sines(turned * frequency, rope.scale)


def cosines_and_sines(angle: Float[Array, "B T _half"], scale: float = 1.0) -> Float[Array, "B T 1 _H"]:
    """Cosines of all channel pairs, then their sines, in float32."""
    made = scale * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # A product with one changes nothing, but what goes into a product is made first, once for all heads and layers:
    # left to itself XLA on a CPU works out cosines anew for every head. Unlike it, a barrier is not kept there.
    return jnp.matmul(made, jnp.eye(made.shape[-1]), precision=jax.lax.Precision.HIGHEST)[..., None, :]


def turn(x: Float[Array, "B T N H"], table: Float[Array, "B T 1 H"]) -> Float[Array, "B T N H"]:
    """Turns channel pairs (i, i + H/2) of all heads, in float32 whatever x is."""
    half = x.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
