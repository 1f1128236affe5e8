"""Merges dropped cache entries into kept ones, for `Stages.merge`.

A method finds a target for each token by `nearest_place` or `nearest_key`, the entries that may be merged by `dropped`,
and merges keys and values by `fold`. No T x T matrix is built. Unbatched. Axes: K key heads · T tokens · H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.matching import unit

_BLOCK_ELEMENTS = 2**22  # similarities held at a time, of one row of the batch


def dropped(kept: Bool[Array, "K T"], scores: Float[Array, "K T"]) -> Bool[Array, "K T"]:
    """Tokens that are neither kept nor padding. `scores` are those that `Stages.merge` gets: -inf for padding."""
    return ~kept & ~jnp.isneginf(scores)


def nearest_place(kept: Bool[Array, "K T"]) -> Int[Array, "K T"]:
    """For each token, the kept token with the nearest index; ties: the lower index."""
    length = kept.shape[1]
    place = jnp.arange(length)
    before = jax.lax.cummax(jnp.where(kept, place, -length), axis=1)
    after = jax.lax.cummin(jnp.where(kept, place, 2 * length), axis=1, reverse=True)
    return jnp.clip(jnp.where(place - before <= after - place, before, after), 0, length - 1)


def nearest_key(k: Float[Array, "K T H"], kept: Bool[Array, "K T"]) -> tuple[Int[Array, "K T"], Float[Array, "K T"]]:
    """The kept token whose key has the largest cosine with each token's key, and that cosine; ties to the earlier."""
    heads, length, _ = k.shape
    vectors = jax.vmap(unit)(k)
    # Kept keys come first, and only blocks with kept keys are compared, so that the work depends on their number.
    order = jnp.argsort(~kept, axis=1, stable=True)
    count = jnp.sum(kept, axis=1)
    block = max(1, min(length, 128, _BLOCK_ELEMENTS // max(heads * length, 1)))
    columns = jnp.pad(at(vectors, order), [(0, 0), (0, -length % block), (0, 0)])

    def compare(i: Int[Array, ""], best: tuple[Array, Array]) -> tuple[Array, Array]:
        candidates = jax.lax.dynamic_slice_in_dim(columns, i * block, block, axis=1)
        cosine = jnp.einsum("kth,ksh->kts", vectors, candidates, precision=jax.lax.Precision.HIGHEST)
        exists = i * block + jnp.arange(block) < count[:, None]
        cosine = jnp.where(exists[:, None], cosine, -jnp.inf)
        largest, place = jnp.max(cosine, axis=-1), i * block + jnp.argmax(cosine, axis=-1)
        better = largest > best[0]
        return jnp.where(better, largest, best[0]), jnp.where(better, place, best[1])

    start = jnp.full((heads, length), -jnp.inf), jnp.zeros((heads, length), jnp.int32)
    cosine, place = jax.lax.fori_loop(0, -(-jnp.max(count) // block), compare, start)
    return jnp.take_along_axis(order, place, axis=1), cosine


def at(x: Float[Array, "K T H"], target: Int[Array, "K T"]) -> Float[Array, "K T H"]:
    """For each token, the entry with the index `target`."""
    return jnp.take_along_axis(x, target[..., None], axis=1)


def fold(
    x: Float[Array, "K T H"], contribution: Float[Array, "K T H"], target: Int[Array, "K T"], gone: Bool[Array, "K T"]
) -> Float[Array, "K T H"]:
    """The mean of each entry and of the contributions that are merged into it.

    Args:
        x: keys or values.
        contribution: what each token adds to its target, usually x itself.
        target: index of the entry into which each token is merged.
        gone: which tokens are merged, usually `dropped`.
    """
    head = jnp.arange(x.shape[0])[:, None]
    amount = gone.astype(jnp.float32)
    total = x.astype(jnp.float32).at[head, target].add(contribution.astype(jnp.float32) * amount[..., None])
    count = jnp.ones(amount.shape).at[head, target].add(amount)
    return (total / count[..., None]).astype(x.dtype)
