"""Rotary position embedding (Su et al. 2021, Eq. 34). Channel i is paired with i + H/2, or channel 2i with 2i + 1.

If only the first channels of a head are rotated, H is their number.

In M-RoPE (Qwen2-VL, Sec. 2.1) each channel pair uses the time, the line or the column. Methods for long contexts divide
the frequencies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.config import RopeConfig


def rope_table(
    positions: Int[Array, "B T A"], head_dim: int, rope: RopeConfig, limit: Int[Array, " B"] | None = None
) -> Float[Array, "B T 1 _H"]:
    """Cosines and sines for `apply_rope` at the given positions, shared by all heads and layers.

    The angle of channel pair i is position * theta^(-2i/H) / divisors[i]. `limit` is from `position_limit`; None: that
    of whole sequences with these positions.
    """
    half = (head_dim if rope.channels is None else rope.channels) // 2
    frequency = rope.theta ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if rope.divisors is not None:
        divisors = jnp.asarray(rope.divisors)
        if rope.long is not None:
            limit = position_limit(jnp.max(positions, axis=(1, 2)) + 1, rope) if limit is None else limit
            assert limit is not None
            divisors = jnp.where((limit > rope.original)[:, None, None], jnp.asarray(rope.long), divisors)
        frequency = frequency / divisors
    position = positions.astype(jnp.float32)
    if rope.axes is not None:
        position = position[..., np.asarray(rope.axes)]  # [B, T, H/2]
    return cosines_and_sines(position * frequency, rope.scale)


def position_limit(length: Int[Array, " B"], rope: RopeConfig) -> Int[Array, " B"] | None:
    """The number of positions for which the rotation of each row is result; None: of any number.

    Only long-RoPE has a limit. A row that may become longer than `original` uses the long divisors from its first
    token, because its keys are cached after rotation. So a row that uses the short ones is limited to `original`.
    `length` counts the tokens of each row and all that may follow.
    """
    if rope.long is None:
        return None
    return jnp.where(length > rope.original, jnp.iinfo(jnp.int32).max, rope.original)


def cosines_and_sines(angle: Float[Array, "B T _half"], scale: float = 1.0) -> Float[Array, "B T 1 _H"]:
    """Cosines of all channel pairs, then their sines, in float32."""
    table = scale * jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)
    # Without this product with the identity, XLA on a CPU computes the cosines again in every head and layer. The
    # inputs of a product are computed once. An optimization barrier does not help, because XLA removes it on a CPU.
    return jnp.matmul(table, jnp.eye(table.shape[-1]), precision=jax.lax.Precision.HIGHEST)[..., None, :]


def apply_rope(
    x: Float[Array, "B T N C"], table: Float[Array, "B T 1 H"], *, neighbours: bool = False
) -> Float[Array, "B T N C"]:
    """Rotates the first H channels of all heads, in float32 for every dtype of x. The others are unchanged.

    With `neighbours`, the pairs are (2i, 2i + 1) instead of (i, i + H/2).
    """
    rotated = table.shape[-1]
    half = rotated // 2
    cos, sin = table[..., :half], table[..., half:]
    first, second = (slice(0, rotated, 2), slice(1, rotated, 2)) if neighbours else (slice(half), slice(half, rotated))
    a, b = x[..., first].astype(jnp.float32), x[..., second].astype(jnp.float32)
    a, b = a * cos - b * sin, b * cos + a * sin
    pairs = jnp.stack([a, b], axis=-1).reshape(*a.shape[:-1], rotated) if neighbours else jnp.concatenate([a, b], -1)
    result = pairs.astype(x.dtype)
    return result if rotated == x.shape[-1] else jnp.concatenate([result, x[..., rotated:]], axis=-1)
