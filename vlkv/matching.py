"""Which tokens are alike, and folding one into the other, while a prompt is read.

Unbatched: a row of T tokens, some of which give themselves away (A) and some of which receive (B). A token belongs to
a group, any integer, and is matched within it: a window of an image, or one group for all. Tokens stay at their places,
and no T x T matrix is built. Axes: T tokens · D width · H width of what is compared.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

_BLOCK_ELEMENTS = 2**22  # similarities held at a time, of one row of the batch


# --- groups ---------------------------------------------------------------------------------------------------------


def numbered(group: Int[Array, " T"]) -> Int[Array, " T"]:
    """The groups that occur, numbered 0, 1, 2, ... upwards, so that T slots are enough for any of them."""
    order = jnp.argsort(group, stable=True)
    new = jnp.diff(group[order], prepend=group[order][:1]) != 0
    return jnp.zeros_like(order).at[order].set(jnp.cumsum(new))


def sum_within(group: Int[Array, " T"], value: Num[Array, " T"] | Bool[Array, " T"]) -> Num[Array, " T"]:
    """The sum of a value, or the number of members of a mask, over each token's group."""
    number = numbered(group)
    return jax.ops.segment_sum(value.astype(jnp.result_type(value, jnp.int32)), number, group.shape[0])[number]


def largest_within(group: Int[Array, " T"], value: Int[Array, " T"]) -> Int[Array, " T"]:
    """The largest of a value over each token's group."""
    number = numbered(group)
    return jax.ops.segment_max(value, number, group.shape[0])[number]


def rank_within(group: Int[Array, " T"], key: Num[Array, " T"]) -> Int[Array, " T"]:
    """Each token's place in its group by a rising key, counting from 0; ties to the earlier token."""
    order = jnp.lexsort((key, group))
    place = jnp.arange(group.shape[0])
    new = jnp.diff(group[order], prepend=group[order][:1]) != 0
    return jnp.zeros_like(order).at[order].set(place - jax.lax.cummax(jnp.where(new, place, 0)))


# --- who goes to whom -----------------------------------------------------------------------------------------------


def unit(x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Vectors of length 1, in float32; zero stays zero."""
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def closest(
    metric: Float[Array, "T H"], receiving: Bool[Array, " T"], group: Int[Array, " T"]
) -> tuple[Int[Array, " T"], Float[Array, " T"]]:
    """The receiving token of each token's group with the largest cosine, and that cosine; ties to the earlier.

    Args:
        metric: what is compared.
        receiving: B, at most half of the tokens.
        group: only tokens of one group are compared.

    Returns:
        Where to, and the cosine: -inf, and a target without meaning, where the group has none that receives.
    """
    length = metric.shape[0]
    vectors = unit(metric)
    places = jnp.argsort(~receiving, stable=True)[: max(1, length // 2)]
    others, theirs = vectors[places], jnp.where(receiving, group, -1)[places]
    taken = receiving[places]

    def search(rows: Float[Array, "W H"], groups: Int[Array, " W"]) -> tuple[Array, Array]:
        cosine = jnp.einsum("th,sh->ts", rows, others, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where(taken & (groups[:, None] == theirs), cosine, -jnp.inf)
        return places[jnp.argmax(cosine, axis=-1)], jnp.max(cosine, axis=-1)

    return _by_blocks(search, vectors, group, others=len(places))


def turns(cosine: Float[Array, " T"], giving: Bool[Array, " T"], group: Int[Array, " T"]) -> Int[Array, " T"]:
    """When each giving token (A) of a group is merged, counting from 0: the closest first, ties to the earlier.

    T, which is never, for those that give nothing or, with a cosine of -inf from `closest`, found nobody.
    """
    giving = giving & ~jnp.isneginf(cosine)
    rank = rank_within(group, jnp.where(giving, -cosine, jnp.inf))
    return jnp.where(giving, rank, giving.shape[0])


def energy(metric: Float[Array, "T H"], members: Bool[Array, " T"], margin: float) -> Float[Array, " T"]:
    """How much each token is like all members: the mean of elu(cosine - margin) over them, itself included (PiToMe)."""
    vectors = unit(metric)

    def average(rows: Float[Array, "W H"]) -> tuple[Array]:
        cosine = jnp.einsum("th,sh->ts", rows, vectors, precision=jax.lax.Precision.HIGHEST)
        return (jnp.sum(jnp.where(members, jax.nn.elu(cosine - margin), 0.0), axis=-1),)

    (total,) = _by_blocks(average, vectors, others=metric.shape[0])
    return total / jnp.maximum(jnp.sum(members), 1)


def _by_blocks(function, *rows, others):
    """`function` of a few rows at a time, which compares each with so many others."""
    length = rows[0].shape[0]
    block = max(1, min(length, 512, _BLOCK_ELEMENTS // others))
    blocks = -(-length // block)

    def split(x):
        padded = jnp.pad(x, [(0, blocks * block - length)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(blocks, block, *x.shape[1:])

    made = jax.lax.map(lambda args: function(*args), tuple(split(x) for x in rows))
    return tuple(x.reshape(-1, *x.shape[2:])[:length] for x in made)


# --- what becomes of them -------------------------------------------------------------------------------------------


def fold(
    x: Float[Array, "T D"], weight: Float[Array, " T"], target: Int[Array, " T"], merged: Bool[Array, " T"]
) -> Float[Array, "T D"]:
    """(w x + sum of w_a x_a) / (w + sum of w_a) where tokens a are merged into one; all others stay as they are.

    Weights of 0 all round leave the one that receives as it is.
    """
    amount = jnp.where(merged, weight.astype(jnp.float32), 0.0)
    full = x.astype(jnp.float32)
    total = (weight[:, None] * full).at[target].add(amount[:, None] * full)
    divisor = weight.astype(jnp.float32).at[target].add(amount)
    changed = receives(target, merged) & (divisor > 0)
    return jnp.where(changed[:, None], total / jnp.where(changed, divisor, 1.0)[:, None], full).astype(x.dtype)


def receives(target: Int[Array, " T"], merged: Bool[Array, " T"]) -> Bool[Array, " T"]:
    """Which tokens others are merged into."""
    return jnp.zeros_like(merged).at[target].max(merged)


def sizes(size: Float[Array, " T"], target: Int[Array, " T"], merged: Bool[Array, " T"]) -> Float[Array, " T"]:
    """How many tokens of the prompt each stands for afterwards; what was merged keeps its own number."""
    return size.at[target].add(jnp.where(merged, size, 0.0))


def largest(x: Float[Array, "T D"], target: Int[Array, " T"], merged: Bool[Array, " T"]) -> Float[Array, "T D"]:
    """The elementwise maximum of each token and of those merged into it."""
    return x.at[target].max(jnp.where(merged[:, None], x, -jnp.inf))
