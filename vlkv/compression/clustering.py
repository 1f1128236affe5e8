"""Clusters around peaks of density: k nearest neighbours in the method of Rodriguez and Laio (2014), as in SparseVLM.

Unbatched. Axes: M points · D width. Distances are computed in blocks of W points, which bound [W, M, D] differences.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from vlkv.compression.matching import by_blocks
from vlkv.masks import top


def density_peaks(
    x: Float[Array, "M D"], members: Bool[Array, " M"], count: Int[Array, ""]
) -> tuple[Bool[Array, " M"], Int[Array, " M"]]:
    """The `count` centres, and the nearest centre of each point.

    Density is exp(-mean squared distance to the `count` nearest members, with the point itself), where distances are
    divided by sqrt(D). A centre has a large product of its density and of its distance to the nearest member of higher
    density; for the densest member, this is the largest distance of all. Of two equal densities, the one of the
    earlier point is higher. A point at equal distances from several centres joins that of the largest product.
    """
    points, place = x.astype(jnp.float32) / jnp.sqrt(x.shape[1]), jnp.arange(len(x))
    neighbours = jnp.minimum(count, jnp.sum(members))

    def distances(rows: Float[Array, "W D"]) -> Float[Array, "W M"]:
        """To all members; inf to others. Differences, because those of squared norms would cancel out."""
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
