"""Integer budgets with exact totals, and exact products of fractions and counts. Axes: L layers · T tokens.

Products of a fraction and a count:

    fraction           rounded half up, at least 1: a table for all counts 0..most, made on the host
    shares             rounded down: a table for all counts 0..most, made on the host
    share              the entry of `shares` for a traced count with a static bound
    unbounded_share    the same for a traced count without a bound
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.masks import binary_search, top


def total(
    keep: float | None, budget: int | None, sums: Int[np.ndarray, " sums"], *, layers: int
) -> Int[np.ndarray, " sums"]:
    """Number of entries that all layers together keep, for each number of tokens in scope of all layers in `sums`.

    `keep` is the fraction of the tokens in scope, rounded half up over all layers; `budget` is the mean number per
    layer. Every layer keeps at least one token and at most all. The order of the product is that of the published
    vectors, floor(keep L n + 0.5) for n tokens in each layer; another order rounds halves differently.
    """
    if layers == 0:
        return np.zeros_like(sums, np.int32)
    asked = layers * (budget or 0) if keep is None else np.floor(keep * layers * (sums / layers) + 0.5)
    return np.minimum(sums, np.maximum(layers, asked)).astype(np.int32)


def fraction(keep: float | None, most: int) -> Int[np.ndarray, " counts"]:
    """`keep` times every number 0..most of tokens, rounded half up, at least one.

    The result is a table, because counts are traced, and the product of a traced count and a fraction would be rounded
    in float32.
    """
    return total(keep, None, np.arange(most + 1), layers=1)


def share(fraction: float, count: Int[Array, "*shape"], most: int) -> Int[Array, "*shape"]:
    """`fraction` times `count`, rounded down, for counts in 0..most. Looked up in `shares`."""
    return jnp.asarray(shares(fraction, most))[count]


@functools.lru_cache(maxsize=256)
def shares(fraction: float, most: int) -> Int[np.ndarray, " counts"]:
    """`fraction` times every number 0..most, rounded down. The fraction is the decimal number that Python prints.

    So 0.29 x 100 is 29, while int(0.29 * 100) is 28 in double precision.
    """
    high, low = Fraction(repr(fraction)).as_integer_ratio()
    return (np.arange(most + 1, dtype=object) * high // low).astype(np.int32)


def unbounded_share(fraction: float, count: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """`share` for a fraction in [0, 1] and counts below 2^17, without a static bound on counts.

    Computed in integers, because 0.53 x 4300 is less than 2279 in float32. The fraction is rounded up to 30 binary
    digits, so that 0.29 x 100 is 29.
    """
    high, low = divmod(math.ceil(fraction * 2**30), 2**15)
    count = count.astype(jnp.uint32)
    return (high * count + (low * count >> 15) >> 15).astype(jnp.int32)


def uniform(total: Int[Array, ""], most: Int[Array, " L"]) -> Int[Array, " L"]:
    """Budgets proportional to the tokens of each layer (`most`); the remainder goes to the lower layers."""
    share = total * (most / jnp.maximum(jnp.sum(most), 1))
    return apportion(share, total, floor=jnp.minimum(1, most), ceiling=most)


def apportion(
    real: Float[Array, " L"],
    total: Int[Array, ""],
    *,
    floor: Int[Array, ""] | Int[Array, " L"] | int,
    ceiling: Int[Array, ""] | Int[Array, " L"],
) -> Int[Array, " L"]:
    """Rounds `real` to integers in [floor, ceiling] with the sum `total`.

    Values outside the bounds are clipped, and the others absorb the difference in proportion, until nothing changes.
    Then values are rounded down, and those with the largest remainders get one more; ties: the lower layer. Remainders
    are compared to a thousandth, so that rounding errors of a float do not decide between equal values. NaN values give
    equal shares. If the bounds do not allow `total`, the nearest possible sum is used.
    """
    layers = real.shape[0]
    ceiling = jnp.broadcast_to(ceiling, (layers,))
    floor = jnp.minimum(floor, ceiling)
    total = jnp.clip(total, jnp.sum(floor), jnp.sum(ceiling))

    def clip(_, state):
        value, free = state  # `free`: within the bounds so far
        bounded = jnp.clip(value, floor, ceiling)
        fixed = free & (bounded != value)
        excess = jnp.sum(jnp.where(fixed, value - bounded, 0.0))
        free = free & ~fixed
        rest = jnp.sum(jnp.where(free, value, 0.0))
        value = jnp.where(fixed, bounded, value)
        return jnp.where(free & (rest > 0), value * (1 + excess / jnp.where(rest > 0, rest, 1.0)), value), free

    value, _ = jax.lax.fori_loop(0, layers, clip, (real.astype(jnp.float32), jnp.ones(layers, bool)))
    value = jnp.clip(jnp.nan_to_num(value), floor, ceiling)
    rounded = jnp.floor(value).astype(jnp.int32)

    def unfinished(rounded):
        return jnp.sum(rounded) != total

    def hand_out(rounded):
        missing = total - jnp.sum(rounded)  # negative if the values, or their lower bounds, sum to more than `total`
        sign = jnp.sign(missing)
        able = jnp.where(sign > 0, rounded < ceiling, rounded > floor)
        remainder = jnp.round((value - rounded) * 1024)
        order = jnp.argsort(jnp.where(able, -sign * remainder, jnp.inf), stable=True)
        rank = jnp.zeros(layers, jnp.int32).at[order].set(jnp.arange(layers, dtype=jnp.int32))
        return rounded + sign * (able & (rank < jnp.abs(missing)))

    return jax.lax.while_loop(unfinished, hand_out, rounded)


def ranked(scores: Float[Array, "K T"], candidates: Bool[Array, " T"]) -> Float[Array, "K T_1"]:
    """Scores for `by_order`: those of the candidates, -inf for other tokens, and one more -inf at the end.

    Statistics of layers with fewer tokens are padded with their last value, and `by_order` does not count -inf.
    """
    return jnp.pad(jnp.where(candidates, scores, -jnp.inf), ((0, 0), (0, 1)), constant_values=-jnp.inf)


def by_order(
    ranked: Float[Array, "M T"],
    total: Int[Array, ""],
    *,
    always: Int[Array, " M"],
    most: Int[Array, " M"],
    safeguard: float = 0.0,
) -> Int[Array, " M"]:
    """Budgets of M heads with the sum `total`.

    The candidates of all heads are ranked together, and a head gets as many entries as it has among the best of them.

    Args:
        ranked: scores of the candidates; -inf for other tokens. Ties: the earlier head, then the earlier token.
        total: for all heads together.
        always: entries that each head keeps besides the candidates.
        most: greatest budget of each head. Every head with tokens gets at least one.
        safeguard: share of the budget that is divided equally.
    """
    heads, remaining = len(ranked), total - jnp.sum(always)
    best = top(ranked.reshape(1, -1), ranked.reshape(1, -1) > -jnp.inf, remaining[None]).reshape(ranked.shape)
    shares_of_heads = (1 - safeguard) * jnp.sum(best, axis=1) + safeguard * remaining / heads
    return apportion(always + shares_of_heads, total, floor=jnp.minimum(1, most), ceiling=most)


def by_order_of_all_layers(
    ranked: Float[Array, "L K T"], total: Int[Array, ""], most: Int[Array, " L"], *, safeguard: float = 0.0
) -> Int[Array, "L K"]:
    """`by_order` for all heads of all layers together. Every head also keeps its tokens in scope that are not ranked.

    Args:
        ranked: as in `by_order`.
        total: for all layers together, per head.
        most: number of tokens in scope of each layer.
        safeguard: as in `by_order`.
    """
    layers, heads, length = ranked.shape
    always = jnp.minimum(most[:, None] - jnp.sum(ranked > -jnp.inf, axis=2), total // layers)
    granted = by_order(
        ranked.reshape(-1, length), heads * total, always=always.reshape(-1), most=jnp.repeat(most, heads),
        safeguard=safeguard,
    )  # fmt: skip
    return granted.reshape(layers, heads)


def smallest(values: Float[Array, "L T"], total: Int[Array, ""]) -> Int[Array, " L"]:
    """For each layer, how many of the `total` smallest values of all layers it has; ties: the lower layer.

    The values must be >= 0; +inf is never counted. Binary search in the ordered bits of a float32 finds the exact
    threshold in 31 steps, without a sort of L x T values.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(values.astype(jnp.float32)), jnp.uint32)  # -0.0 is 0.0
    threshold, bits = binary_search(bits, 31, lambda bits, number: jnp.sum(bits < number) <= total)
    infinity = jnp.uint32(0x7F800000)
    threshold = jnp.minimum(threshold, infinity)
    below = jnp.sum(bits < threshold, axis=1)
    equal = jnp.where(threshold < infinity, jnp.sum(bits == threshold, axis=1), 0)
    remaining = total - jnp.sum(below)
    return below + jnp.clip(remaining - (jnp.cumsum(equal) - equal), 0, equal)
