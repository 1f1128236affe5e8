from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from vlkv.compression import matching, merging
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.masks import evenly, top


class PruMerge(ReducingPolicy):
    """Keeps outliers of the class attention and tokens at equal distances; merges the others (Shang et al. 2024).

    A token is an outlier if its attention exceeds the third quartile by 1.5 times the distance of the quartiles. Every
    other token is merged into the most similar kept one by the cosine of the embeddings, weighted by attention.

    Attributes:
        plus: tokens at equal distances in raster order are added until the budget is reached, as in PruMerge+; False:
            only outliers are kept, at most the budget and at least one token.
    """

    plus: bool = True
    class_attention_layers = (-1,)  # the last block that runs

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        vision, attention = tokens.valid & tokens.is_vision, tokens.tower_attention[-1]
        count = self.count(vision)
        low, high = quartiles(attention, vision)
        outliers = jnp.sum(vision & (attention > high + 1.5 * (high - low)))
        best = top(attention[None], vision, jnp.clip(outliers, 1, count)[None])[0]
        kept = best | evenly(vision & ~best, count - jnp.sum(best)) if self.plus else best
        target = merging.nearest_key(tokens.x[None], kept[None])[0][0]
        merged = vision & ~kept
        x = matching.fold(tokens.x, attention, target, merged)
        size = matching.sizes(tokens.size, target, merged)
        return dataclasses.replace(tokens, x=x, size=size), tokens.valid & (~tokens.is_vision | kept)


def quartiles(x: Float[Array, " T"], among: Mask) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The first and the third quartile of the values in a mask, interpolated linearly."""
    ordered, count = jnp.sort(jnp.where(among, x, jnp.inf)), jnp.sum(among)

    def quantile(quarter: int) -> Float[Array, ""]:
        place = quarter * jnp.maximum(count - 1, 0)  # in quarters
        below, above = (ordered[jnp.minimum(place // 4 + i, jnp.maximum(count - 1, 0))] for i in (0, 1))
        return below + (above - below) * (place % 4) / 4

    return quantile(1), quantile(3)
