"""Rotary position embedding, the half-split convention of Llama (Su et al. 2021, Eq. 34), and its relatives.

M-RoPE (Qwen2-VL, Sec. 2.1) lets channel pairs turn by time, line or column; long-RoPE (Phi-3) divides frequencies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.config import RopeConfig


def rotate(x: Float[Array, "B T N H"], positions: Int[Array, "B T A"], rope: RopeConfig) -> Float[Array, "B T N H"]:
    """Turns channel pairs (i, i + H/2) by position * theta^(-2i/H). Angles are float32 whatever x is."""
    half = x.shape[-1] // 2
    frequency = rope.theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if rope.short is not None:
        longest = jnp.max(positions, axis=(1, 2), keepdims=True) + 1  # of each row: rows must not meddle
        factors = jnp.where(longest > rope.original, jnp.asarray(rope.long), jnp.asarray(rope.short))
        frequency = frequency / factors  # [B, 1, H/2]
    turned = positions.astype(jnp.float32)
    if rope.sections is not None:
        turned = turned[..., np.repeat(np.arange(len(rope.sections)), rope.sections)]  # [B, T, H/2]
    return turn(x, turned * frequency, rope.scale)


def turn(x: Float[Array, "B T N H"], angle: Float[Array, "B T H//2"], scale: float = 1.0) -> Float[Array, "B T N H"]:
    """Turns channel pairs (i, i + H/2) of all heads by their angles, in float32."""
    half = x.shape[-1] // 2
    table = scale * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # A product with one changes nothing, but what goes into a product is made first, once for all heads and layers:
    # left to itself XLA on a CPU works out cosines anew for every head. Unlike it, a barrier is not kept there.
    table = jnp.matmul(table, jnp.eye(2 * half), precision=jax.lax.Precision.HIGHEST)[..., None, :]  # [B, T, 1, H]
    cos, sin = table[..., :half], table[..., half:]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
