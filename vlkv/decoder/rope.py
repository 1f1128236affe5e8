"""Rotary position embedding (Su et al. 2021, Eq. 34), in Llama's convention: channel i is paired with i + H/2.

In M-RoPE (Qwen2-VL, Sec. 2.1) each channel pair uses the time, the line or the column. Long-RoPE (Phi-3) divides the
frequencies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.config import RopeConfig


def rope_table(positions: Int[Array, "B T A"], head_dim: int, rope: RopeConfig) -> Float[Array, "B T 1 _H"]:
    """Cosines and sines for `apply_rope` at the given positions, shared by all heads and layers.

    The angle of channel pair (i, i + H/2) is position * theta^(-2i/H).
    """
    half = head_dim // 2
    frequency = rope.theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if rope.short is not None:
        longest = jnp.max(positions, axis=(1, 2), keepdims=True) + 1  # per row, so that rows do not affect each other
        factors = jnp.where(longest > rope.original, jnp.asarray(rope.long), jnp.asarray(rope.short))
        frequency = frequency / factors  # [B, 1, H/2]
    position = positions.astype(jnp.float32)
    if rope.sections is not None:
        position = position[..., np.repeat(np.arange(len(rope.sections)), rope.sections)]  # [B, T, H/2]
    return cosines_and_sines(position * frequency, rope.scale)


def cosines_and_sines(angle: Float[Array, "B T _half"], scale: float = 1.0) -> Float[Array, "B T 1 _H"]:
    """Cosines of all channel pairs, then their sines, in float32."""
    table = scale * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # Without this product with the identity, XLA on a CPU computes the cosines again in every head and layer. The
    # inputs of a product are computed once. An optimization barrier does not help, because XLA removes it on a CPU.
    return jnp.matmul(table, jnp.eye(table.shape[-1]), precision=jax.lax.Precision.HIGHEST)[..., None, :]


def apply_rope(x: Float[Array, "B T N H"], table: Float[Array, "B T 1 H"]) -> Float[Array, "B T N H"]:
    """Rotates the channel pairs (i, i + H/2) of all heads, in float32 for every dtype of x."""
    half = x.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
