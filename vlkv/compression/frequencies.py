"""Low-pass filter along the tokens, by a discrete cosine transform whose length is the number of valid tokens.

Rows have different numbers of tokens under one static bound, so no library transform fits. A transform of any length n
is a convolution with a chirp (Bluestein 1970), which FFTs of one static size compute in O(T log T).

Unbatched. Axes: T tokens · H head dim · F size of the FFTs.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, Int


def low_pass(x: Float[Array, "T H"], count: Int[Array, ""], highest: Int[Array, ""]) -> Float[Array, "T H"]:
    """The part of the first `count` rows whose DCT-II has the frequencies 0..`highest`; 0 in the other rows."""
    place, count = jnp.arange(len(x)), jnp.maximum(count, 1)
    inside = (place < count)[:, None]
    half = _turn(place, count)[:, None]  # exp(-i pi m / 2n)
    spectrum = jnp.real(half * _transform(jnp.where(inside, x.astype(jnp.float32), 0.0), count))
    scale = jnp.where(place > 0, 2.0, 1.0) / count
    kept = jnp.where((inside[:, 0] & (place <= highest))[:, None], spectrum * scale[:, None], 0.0)
    return jnp.where(inside, jnp.real(_transform(kept * half, count)), 0.0)


def _transform(x: Float[Array, "T H"] | Complex[Array, "T H"], count: Int[Array, ""]) -> Complex[Array, "T H"]:
    """sum_t x_t exp(-i pi m t / n) for every m; 2 m t = m^2 + t^2 - (m - t)^2 makes it a convolution."""
    length = len(x)
    size = 2 ** (2 * length - 1).bit_length()
    place = jnp.arange(length)
    chirp = _turn(_squares(place, 4 * count), count)  # exp(-i pi m^2 / 2n)
    around = jnp.zeros(size, chirp.dtype).at[place].set(jnp.conj(chirp)).at[-place].set(jnp.conj(chirp))
    product = jnp.fft.fft(x * chirp[:, None], size, axis=0) * jnp.fft.fft(around)[:, None]
    return chirp[:, None] * jnp.fft.ifft(product, axis=0)[:length]


def _turn(number: Int[Array, " T"], count: Int[Array, ""]) -> Complex[Array, " T"]:
    """exp(-i pi number / 2 count)."""
    angle = number * (jnp.pi / (2 * count))
    return jnp.cos(angle) - 1j * jnp.sin(angle)


def _squares(place: Int[Array, " T"], modulus: Int[Array, ""]) -> Int[Array, " T"]:
    """place^2 modulo a number, in 32 bits: the phase of a float32 would be wrong after a few thousand tokens."""
    low, high = place * (place & 255) % modulus, place * (place >> 8) % modulus
    return (low + high * 256) % modulus
