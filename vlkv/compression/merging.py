"""Merges dropped cache entries into kept ones.

Unbatched. Axes: K key heads · T tokens · H head dim. Keys and values are merged with the same weights, and no T x T
matrix is built.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK_ELEMENTS = 2**22  # similarities held at a time, of one row of the batch


def dropped(kept: Bool[Array, "K T"], scores: Float[Array, "K T"]) -> Bool[Array, "K T"]:
    """Tokens that are neither kept nor padding (padding has a score of -inf in `Selection.scores`)."""
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
    heads, length, head_dim = k.shape
    unit = k.astype(jnp.float32)
    unit = unit / jnp.maximum(jnp.linalg.norm(unit, axis=-1, keepdims=True), 1e-12)
    block = max(1, min(length, 512, _BLOCK_ELEMENTS // max(heads * length, 1)))
    blocks = -(-length // block)
    rows = jnp.pad(unit, [(0, 0), (0, blocks * block - length), (0, 0)])
    rows = rows.reshape(heads, blocks, block, head_dim).transpose(1, 0, 2, 3)

    def search(rows: Float[Array, "K W H"]) -> tuple[Array, Array]:
        cosine = jnp.einsum("kth,ksh->kts", rows, unit, precision=jax.lax.Precision.HIGHEST)
        cosine = jnp.where(kept[:, None], cosine, -jnp.inf)
        return jnp.argmax(cosine, axis=-1), jnp.max(cosine, axis=-1)

    target, cosine = jax.lax.map(search, rows)  # [blocks, K, block]
    return tuple(x.transpose(1, 0, 2).reshape(heads, -1)[:, :length] for x in (target, cosine))


def at(x: Float[Array, "K T H"], target: Int[Array, "K T"]) -> Float[Array, "K T H"]:
    """The entries at `target`."""
    return jnp.take_along_axis(x, target[..., None], axis=1)


def fold(
    x: Float[Array, "K T H"],
    contribution: Float[Array, "K T H"],
    target: Int[Array, "K T"],
    gone: Bool[Array, "K T"],
) -> Float[Array, "K T H"]:
    """The mean of each entry and of the contributions that are merged into it.

    Args:
        x: keys or values.
        contribution: of each token.
        target: the entry into which each token is merged.
        gone: which tokens are merged.
    """
    head = jnp.arange(x.shape[0])[:, None]
    amount = gone.astype(jnp.float32)
    total = x.astype(jnp.float32).at[head, target].add(contribution.astype(jnp.float32) * amount[..., None])
    count = jnp.ones(amount.shape).at[head, target].add(amount)
    return (total / count[..., None]).astype(x.dtype)
