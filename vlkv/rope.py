"""Rotary position embedding, the half-split convention of Llama (Su et al. 2021, Eq. 34)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(x: Float[Array, "B T N H"], positions: Int[Array, "B T 1"], theta: float) -> Float[Array, "B T N H"]:
    """Turns channel pairs (i, i + H/2) by position * theta^(-2i/H). Angles are float32 whatever x is."""
    half = x.shape[-1] // 2
    frequency = theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[..., None] * frequency  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
