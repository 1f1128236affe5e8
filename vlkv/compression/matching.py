"""Finds similar tokens of a prompt and merges them, for methods that reduce the prompt.

Tokens of a set A ("giving") are merged into tokens of a set B ("receiving"). `target` is the index of the token into
which each token would be merged, and the mask `merged` selects the tokens for which this happens. A group is an integer
for each token, such as the number of a window of the image: only tokens of the same group are merged.

Unbatched. Arrays keep their order and length, and no T x T matrix is built: `by_blocks` compares some rows at a time.
Axes: T tokens · D width · H width of the compared vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from vlkv.masks import top

_BLOCK_ELEMENTS = 2**22  # similarities held at a time, of one row of the batch


# --- groups ---------------------------------------------------------------------------------------------------------


def numbered(group: Int[Array, " T"]) -> Int[Array, " T"]:
    """The groups renumbered 0, 1, 2, ..., so that an array of size T can index them."""
    order = jnp.argsort(group, stable=True)
    new = jnp.diff(group[order], prepend=group[order][:1]) != 0  # the first token of each further group
    return jnp.zeros_like(order).at[order].set(jnp.cumsum(new))


def sum_within(group: Int[Array, " T"], value: Num[Array, " T"] | Bool[Array, " T"]) -> Num[Array, " T"]:
    """For each token, the sum of `value` (or the count of a mask) over its group."""
    number = numbered(group)
    return jax.ops.segment_sum(value.astype(jnp.result_type(value, jnp.int32)), number, group.shape[0])[number]


def largest_within(group: Int[Array, " T"], value: Num[Array, " T"]) -> Num[Array, " T"]:
    """For each token, the largest `value` in its group."""
    number = numbered(group)
    return jax.ops.segment_max(value, number, group.shape[0])[number]


def rank_within(group: Int[Array, " T"], key: Num[Array, " T"]) -> Int[Array, " T"]:
    """Each token's rank in its group by increasing key, starting at 0; ties: the earlier token first."""
    order = jnp.lexsort((key, group))
    place = jnp.arange(group.shape[0])
    new = jnp.diff(group[order], prepend=group[order][:1]) != 0
    return jnp.zeros_like(order).at[order].set(place - jax.lax.cummax(jnp.where(new, place, 0)))


# --- matching -------------------------------------------------------------------------------------------------------


def unit(x: Float[Array, "T H"]) -> Float[Array, "T H"]:
    """Vectors of length 1, in float32; zero vectors stay zero."""
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def along_mean(x: Float[Array, "T H"], among: Bool[Array, " T"]) -> tuple[Float[Array, " T"], Float[Array, ""]]:
    """The product of each vector, scaled to length 1, with the mean of the scaled vectors of `among`.

    Also returns the length of this mean.
    """
    x = x.astype(jnp.float32)
    scale = 1 / jnp.maximum(jnp.linalg.norm(x, axis=-1), 1e-12)
    weight = jnp.where(among, scale, 0.0) / jnp.maximum(jnp.sum(among), 1)
    mean = jnp.einsum("t,th->h", weight, x, precision=jax.lax.Precision.HIGHEST)
    product = jnp.einsum("th,h->t", x, mean, precision=jax.lax.Precision.HIGHEST)
    return product * scale, jnp.linalg.norm(mean)


def closest(
    metric: Float[Array, "T H"], receiving: Bool[Array, " T"], group: Int[Array, " T"]
) -> tuple[Int[Array, " T"], Float[Array, " T"]]:
    """For each token, the token of B in its group with the largest cosine, and this cosine; ties: the earlier token.

    Args:
        metric: vectors to compare.
        receiving: B, at most half of the tokens.
        group: only tokens of the same group are compared.

    Returns:
        Targets and cosines. If the group has no token in B, the cosine is -inf and the target undefined.
    """
    length = metric.shape[0]
    vectors = unit(metric)
    # The tokens of B come first, then others up to the static bound.
    tokens = jnp.argsort(~receiving, stable=True)[: max(1, length // 2)]
    b_vectors, b_group, in_b = vectors[tokens], jnp.where(receiving, group, -1)[tokens], receiving[tokens]

    def search(rows: Float[Array, "W H"], groups: Int[Array, " W"]) -> tuple[Array, Array]:
        cosine = jnp.einsum("th,sh->ts", rows, b_vectors, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where(in_b & (groups[:, None] == b_group), cosine, -jnp.inf)
        return tokens[jnp.argmax(cosine, axis=-1)], jnp.max(cosine, axis=-1)

    return by_blocks(search, vectors, group, others=len(tokens))


def nearest(metric: Float[Array, "T H"], members: Bool[Array, " T"]) -> Float[Array, " T"]:
    """For each token, the largest cosine with another member; -inf if there is none."""
    vectors, place = unit(metric), jnp.arange(metric.shape[0])

    def search(rows: Float[Array, "W H"], numbers: Int[Array, " W"]) -> tuple[Array]:
        cosine = jnp.einsum("th,sh->ts", rows, vectors, precision=jax.lax.Precision.HIGHEST)
        return (jnp.max(jnp.where(members & (place != numbers[:, None]), cosine, -jnp.inf), axis=-1),)

    return by_blocks(search, vectors, place, others=len(place))[0]


def mean_softmax(x: Float[Array, "T D"], rows: Bool[Array, " T"], keys: Bool[Array, " T"]) -> Float[Array, " T"]:
    """For each token of `keys`, the mean over the tokens of `rows` of the softmax of their dot products; else 0.

    The softmax is over `keys`.
    """
    vectors = x.astype(jnp.float32)

    def products(block: Float[Array, "W D"]) -> Float[Array, "W T"]:
        return jnp.einsum("td,sd->ts", block, vectors, precision=jax.lax.Precision.HIGHEST)

    def normalise(block: Float[Array, "W D"]) -> tuple[Array]:
        return (jax.nn.logsumexp(products(block), axis=1, where=keys),)

    (lse,) = by_blocks(normalise, vectors, others=len(x))

    def received(block: Float[Array, "W D"]) -> tuple[Array]:
        return (jnp.sum(jnp.where(rows, jnp.exp(products(block) - lse), 0.0), axis=1),)

    (total,) = by_blocks(received, vectors, others=len(x))
    return jnp.where(keys, total, 0.0) / jnp.maximum(jnp.sum(rows), 1)


def merge_order(cosine: Float[Array, " T"], giving: Bool[Array, " T"], group: Int[Array, " T"]) -> Int[Array, " T"]:
    """The rank of each token of A in its group, by decreasing cosine; ties: the earlier token. Merge the lowest ranks.

    Tokens that cannot be merged, those outside A and those with a cosine of -inf, have the rank T.
    """
    giving = giving & ~jnp.isneginf(cosine)
    rank = rank_within(group, jnp.where(giving, -cosine, jnp.inf))
    return jnp.where(giving, rank, giving.shape[0])


def energy(metric: Float[Array, "T H"], members: Bool[Array, " T"], margin: float) -> Float[Array, " T"]:
    """Similarity of each token to all members: the mean of elu(cosine - margin), including itself (PiToMe)."""
    vectors = unit(metric)

    def average(rows: Float[Array, "W H"]) -> tuple[Array]:
        cosine = jnp.einsum("th,sh->ts", rows, vectors, precision=jax.lax.Precision.HIGHEST)
        return (jnp.sum(jnp.where(members, jax.nn.elu(cosine - margin), 0.0), axis=-1),)

    (total,) = by_blocks(average, vectors, others=metric.shape[0])
    return total / jnp.maximum(jnp.sum(members), 1)


def by_blocks(
    function: Callable[..., tuple[Array, ...]], *rows: Shaped[Array, "T ..."], others: int
) -> tuple[Any, ...]:
    """Applies `function` to some rows at a time, so that its temporary arrays are small. Returns results for all rows.

    Args:
        function: from a block of each of `rows` to arrays with as many rows.
        rows: arrays with T rows.
        others: how many numbers `function` computes for each row, which limits the rows of a block.
    """
    length = rows[0].shape[0]
    block = max(1, min(length, 512, _BLOCK_ELEMENTS // others))
    blocks = -(-length // block)

    def split(x):
        padded = jnp.pad(x, [(0, blocks * block - length)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(blocks, block, *x.shape[1:])

    results = jax.lax.map(lambda args: function(*args), tuple(split(x) for x in rows))
    return tuple(x.reshape(-1, *x.shape[2:])[:length] for x in results)


# --- clustering ---------------------------------------------------------------------------------------------------


def density_peaks(
    x: Float[Array, "M D"], members: Bool[Array, " M"], count: Int[Array, ""]
) -> tuple[Bool[Array, " M"], Int[Array, " M"]]:
    """The `count` centres of density, and the nearest centre of each point (Rodriguez and Laio 2014, as in SparseVLM).

    Density is exp(-mean squared distance to the `count` nearest members, with the point itself), where distances are
    divided by sqrt(D). A centre has a large product of its density and of its distance to the nearest member of higher
    density; for the densest member, this is the largest distance of all. Of two equal densities, the one of the
    earlier point is higher. A point at equal distances from several centres joins that of the largest product.
    """
    points, place = x.astype(jnp.float32) / jnp.sqrt(x.shape[1]), jnp.arange(len(x))
    neighbours = jnp.minimum(count, jnp.sum(members))

    def distances(rows: Float[Array, "W D"]) -> Float[Array, "W M"]:
        """To all members; inf to others. From differences: |a|^2 + |b|^2 - 2ab would lose digits of small distances."""
        square = jnp.sum((points - rows[:, None]) ** 2, axis=-1)
        return jnp.where(members, jnp.sqrt(square), jnp.inf)

    def measure(rows: Float[Array, "W D"]) -> tuple[Array, Array]:
        apart_from = distances(rows)
        nearest = jnp.where(place < neighbours, jnp.sort(apart_from, axis=1), 0.0)
        mean = jnp.sum(nearest**2, axis=1) / jnp.maximum(neighbours, 1)
        return jnp.exp(-mean), jnp.max(jnp.where(members, apart_from, 0.0), axis=1)

    density, farthest = by_blocks(measure, points, others=x.size)
    widest = jnp.max(jnp.where(members, farthest, 0.0))

    def separate(rows: Float[Array, "W D"], densities: Float[Array, " W"], at: Int[Array, " W"]) -> tuple[Array]:
        denser = (density > densities[:, None]) | (density == densities[:, None]) & (place < at[:, None])
        return (jnp.min(jnp.where(denser, distances(rows), jnp.inf), axis=1),)

    (apart,) = by_blocks(separate, points, density, place, others=x.size)
    score = density * jnp.minimum(apart, widest)
    centres = top(score[None], members, count[None])[0]
    order = jnp.argsort(jnp.where(centres, -score, jnp.inf), stable=True)

    def join(rows: Float[Array, "W D"]) -> tuple[Array]:
        apart_from = jnp.where(centres, distances(rows), jnp.inf)[:, order]
        return (order[jnp.argmin(apart_from, axis=1)],)

    (target,) = by_blocks(join, points, others=x.size)
    return centres, jnp.where(centres, place, target)


# --- merging --------------------------------------------------------------------------------------------------------


def fold(
    x: Float[Array, "T D"], weight: Float[Array, " T"], target: Int[Array, " T"], merged: Bool[Array, " T"]
) -> Float[Array, "T D"]:
    """Merges tokens as weighted means: (w x + sum of w_a x_a) / (w + sum of w_a), if tokens a are merged into x.

    Other tokens do not change, nor does x if all of these weights are 0.
    """
    amount = jnp.where(merged, weight.astype(jnp.float32), 0.0)
    full = x.astype(jnp.float32)
    total = (weight[:, None] * full).at[target].add(amount[:, None] * full)
    divisor = weight.astype(jnp.float32).at[target].add(amount)
    changed = receives(target, merged) & (divisor > 0)
    return jnp.where(changed[:, None], total / jnp.where(changed, divisor, 1.0)[:, None], full).astype(x.dtype)


def fold_pairs(
    x: Float[Array, "T D"],
    weight: Float[Array, " T"],
    target: Int[Array, " T"],
    merged: Bool[Array, " T"],
    receiving: Bool[Array, " T"],
    group: Int[Array, " T"],
) -> Float[Array, "T D"]:
    """`fold`, in which a token may be merged into several tokens of B.

    A merged token is merged into its target, and into all tokens of B in its group whose cosine with it is at least the
    smallest cosine of a merged token and its target in this group.

    Args:
        x: the tokens, which are also compared.
        weight: of each token.
        target: the nearest token of B.
        merged: tokens of A that are merged.
        receiving: tokens of B.
        group: only tokens of the same group are compared.
    """
    vectors, full, place = unit(x), x.astype(jnp.float32), jnp.arange(x.shape[0])
    amount = jnp.where(merged, weight.astype(jnp.float32), 0.0)
    cosine = jnp.sum(vectors * vectors[target], axis=-1)
    least = -largest_within(group, jnp.where(merged, -cosine, -jnp.inf))

    def receive(rows: Float[Array, "W D"], b: Int[Array, " W"], in_b: Bool[Array, " W"]) -> tuple[Array, Array]:
        cosine = jnp.einsum("td,sd->ts", rows, vectors, precision=jax.lax.Precision.HIGHEST)
        near = in_b[:, None] & (group[b][:, None] == group) & (cosine >= least[b][:, None])
        weights = jnp.where(near | (target == b[:, None]), amount, 0.0)
        return jnp.einsum("ts,sd->td", weights, full, precision=jax.lax.Precision.HIGHEST), jnp.sum(weights, axis=-1)

    total, received = by_blocks(receive, vectors, place, receiving, others=x.shape[0])
    receiver = weight.astype(jnp.float32)
    mean = (receiver[:, None] * full + total) / jnp.maximum(receiver + received, 1e-30)[:, None]
    return jnp.where((received > 0)[:, None], mean, full).astype(x.dtype)


def receives(target: Int[Array, " T"], merged: Bool[Array, " T"]) -> Bool[Array, " T"]:
    """Tokens into which others are merged."""
    return jnp.zeros_like(merged).at[target].max(merged)


def sizes(size: Float[Array, " T"], target: Int[Array, " T"], merged: Bool[Array, " T"]) -> Float[Array, " T"]:
    """Number of prompt tokens that each token represents after merging; merged tokens keep their number."""
    return size.at[target].add(jnp.where(merged, size, 0.0))


def largest(x: Float[Array, "T D"], target: Int[Array, " T"], merged: Bool[Array, " T"]) -> Float[Array, "T D"]:
    """The elementwise maximum of each token and the tokens merged into it."""
    return x.at[target].max(jnp.where(merged[:, None], x, -jnp.inf))
