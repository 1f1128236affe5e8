"""Masks of tokens: the first, the last, or the best of them, and their order.

Axes: T tokens · K key heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def ordinal(mask: Bool[Array, " T"]) -> Int[Array, " T"]:
    """Each token's index among those in the mask, starting at 0; not defined for tokens outside it."""
    return jnp.cumsum(mask) - 1


def first(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """The first `count` tokens of a mask."""
    return mask & (ordinal(mask) < count)


def last(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """The last `count` tokens of a mask."""
    return mask & (ordinal(mask) >= jnp.sum(mask) - count)


def evenly(mask: Bool[Array, " T"], count: Int[Array, ""] | int) -> Bool[Array, " T"]:
    """`count` tokens of a mask at equal distances: those at places floor(i n / count) of its n tokens."""
    number, place = jnp.maximum(jnp.sum(mask), 1), ordinal(mask)

    def before(place: Int[Array, " T"]) -> Int[Array, " T"]:
        """ceil(place count / number) in two parts, because the product exceeds 32 bits beyond 46,000 tokens."""
        high, low = -place >> 8, -place & 255
        return -(high * count // number * 256 + (high * count % number * 256 + low * count) // number)

    return mask & (before(place + 1) > before(place))


def tokens_at(place: Int[Array, " T"], places: int) -> Int[Array, " n"]:
    """Inverse of `place`: the token at each place from 0 to places - 1; -1: none. Larger places are ignored."""
    token = jnp.arange(place.shape[0], dtype=jnp.int32)
    return jnp.full(places, -1, jnp.int32).at[place].set(token, mode="drop", wrap_negative_indices=False)


def tokens_of(mask: Bool[Array, " T"], most: int | None = None) -> Int[Array, " n"]:
    """The first `most` tokens of a mask, or all of them; -1 after the last one."""
    most = mask.shape[0] if most is None else min(most, mask.shape[0])
    return tokens_at(jnp.where(mask, ordinal(mask), most), most)


def end_of(positions: Int[Array, "B T A"], valid: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """The position after each row: in M-RoPE, the greatest one on all axes plus one."""
    return jnp.max(jnp.where(valid[..., None], positions, -1), axis=(1, 2)) + 1


def run_ends(mask: Bool[Array, "*B T"]) -> Int[Array, "*B T"]:
    """Index of the last token of each run of tokens in the mask; for other tokens, their own index."""
    place = jnp.arange(mask.shape[-1], dtype=jnp.int32)
    goes_on = mask & jnp.roll(mask, -1, axis=-1) & (place < mask.shape[-1] - 1)
    return jax.lax.cummin(jnp.where(goes_on, mask.shape[-1], place), axis=mask.ndim - 1, reverse=True)


def binary_search(
    x: Any, bits: int, holds: Callable[[Any, Any], Any], shape: tuple[int, ...] = ()
) -> tuple[UInt32[Array, "*shape"], Any]:
    """Binary search for the largest `bits`-bit number with `holds(x, number)`, which must be true up to a threshold.

    Returns the number, 0 if there is none, and the x that was compared. XLA may compute an array again wherever it is
    used, and round it differently there, but a result of a loop has one value. So compare the number with this x.
    """

    def set_bit(i: Int[Array, ""], state: tuple[UInt32[Array, "*shape"], Any]) -> tuple[UInt32[Array, "*shape"], Any]:
        number, x = state
        higher = number | jnp.uint32(1 << bits - 1) >> i.astype(jnp.uint32)
        # `higher` is never 0, but XLA does not know this, so it cannot take x out of the loop.
        same = jax.tree.map(lambda leaf: jnp.where(higher == 0, jnp.zeros_like(leaf), leaf), x)
        return jnp.where(holds(x, higher), higher, number), same

    return jax.lax.fori_loop(0, bits, set_bit, (jnp.zeros(shape, jnp.uint32), x))


def top(
    x: Float[Array, "K T"],
    candidates: Bool[Array, "#K T"] | Bool[Array, " T"],
    count: Int[Array, " K"],
    place: Int[Array, "K T"] | None = None,
) -> Bool[Array, "K T"]:
    """The `count` best candidates of each head, or all if there are fewer; ties: the earlier token. NaN counts as -inf.

    `place` is the order of the tokens, below 2^24; None: they are in order.
    Binary search in the ordered bits of a float32 finds the worst value that is taken: 32 counts instead of a sort.
    """
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # 0 and -0 are equal
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(x), -jnp.inf, x), jnp.int32)
    order = jax.lax.bitcast_convert_type(bits ^ (bits >> 31 & 0x7FFFFFFF), jnp.uint32) ^ jnp.uint32(1 << 31)
    order = jnp.where(candidates, order, 0)  # below every float
    wanted = count[:, None]

    def enough(order: UInt32[Array, "K T"], least: UInt32[Array, "K 1"]) -> Bool[Array, "K 1"]:
        return jnp.sum(order >= least, axis=1, keepdims=True) >= wanted

    least, order = binary_search(order, 32, enough, wanted.shape)
    above, equal = order > least, order == least
    remaining = wanted - jnp.sum(above, axis=1, keepdims=True)
    if place is not None:
        return above & candidates | top(-place.astype(jnp.float32), equal & candidates, remaining[:, 0])
    return (above | equal & (jnp.cumsum(equal, axis=1) <= remaining)) & candidates
