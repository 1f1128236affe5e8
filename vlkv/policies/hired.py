"""HiRED: the tower's first block divides an image's budget among partitions; its last block selects tokens in each.

Axes: T tokens. Partitions of a row are numbered from 0, so an array of size T can index them.
"""

from __future__ import annotations

import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from vlkv.compression import budgets, matching
from vlkv.compression.option_types import Range, Variant
from vlkv.compression.policy import Mask, Observation
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens
from vlkv.policies.lightkv import part


class HiRED(ReducingPolicy):
    """Keeps the tokens of each partition that the class token attends to most in the last block (Arif et al. 2024).

    An image that is cut into tiles keeps floor(keep n) of its n tokens. The overview gets floor(alpha x that); tile i
    gets floor(rest x a_i / sum a), where a_i is the attention in the tower's first block to the cell of the overview
    that shows the tile. An image with one partition keeps floor(keep n) tokens, at least one. Tokens that are no patch,
    such as the newlines of LLaVA-NeXT, are dropped, as in the published code; with keep=1 all tokens are kept.

    The published code uses bands of the overview's tokens in raster order, and the number of the V (1 - alpha) most
    attended tokens in a band.

    Attributes:
        alpha: share of the overview.
        variant: "released" divides the budget as the published code does.
    """

    alpha: Annotated[float, Range(0, 1, below=True)] = 0.5
    variant: Variant = "paper"
    class_attention_layers = (0, -1)  # the first block for budgets, the last one that runs for the choice of tokens

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """A bound; it is reached if all images but one consist of a single token."""
        if self.keep == 1:
            return vision
        single = max(images, 1) - 1
        return min(vision, single + max(1, math.ceil(self.last_keep * (vision - single))))

    def choose(self, tokens: Tokens, obs: Observation | None, vision: Mask) -> Mask:
        if self.keep == 1:
            return vision
        first, late = tokens.tower_attention
        image, line = tokens.grid[:, 0], tokens.grid[:, 1]
        partition = jnp.where(line >= 0, image, -1) if tokens.tiles is None else tokens.tiles[:, 0]
        shown = jnp.full_like(partition, -1) if tokens.tiles is None else tokens.tiles[:, 1]
        partition, shown = (jnp.where(vision, x, -1) for x in (partition, shown))
        granted = self.granted(first, partition, shown)
        return (partition >= 0) & (matching.rank_within(partition, -late) < granted[partition])

    def granted(
        self, first: Float[Array, " T"], partition: Int[Array, " T"], shown: Int[Array, " T"]
    ) -> Int[Array, " T"]:
        """Number of tokens that each partition of a row keeps.

        Args:
            first: attention that each token receives in the tower's first block, averaged over heads.
            partition: of each token; -1: none.
            shown: for tokens of an overview, the partition that shows the same part of the image; -1: none.
        """
        length = partition.shape[0]

        def summed(value: Array, number: Array) -> Array:
            return jax.ops.segment_sum(value, jnp.where(number < 0, length, number), length + 1)[:length]

        number = jnp.arange(length)
        size = summed(jnp.ones_like(partition), partition)
        view = jax.ops.segment_max(partition, jnp.where(shown < 0, length, shown), length + 1)[:length]
        is_part = view >= 0
        view = jnp.where(is_part, view, number)  # the overview of the partition's image
        asked = budgets.share(self.last_keep, summed(size, view), length)
        parts = summed(is_part.astype(jnp.int32), view)
        overview = jnp.minimum(budgets.share(self.alpha, asked, length), size)
        if self.variant == "paper":
            area = summed(first, shown)
            total = summed(area, view)[view]
            share = (asked - overview)[view] * (area / jnp.where(total > 0, total, 1.0))
            of_tile = jnp.floor(share).astype(jnp.int32)
        else:
            most = budgets.share(1 - self.alpha, size, length)
            best = (shown >= 0) & (matching.rank_within(partition, -first) < most[partition])
            lowest = jax.ops.segment_min(jnp.where(is_part, number, length), view, length)
            band = part(matching.rank_within(partition, number), size[partition], jnp.maximum(parts[partition], 1))
            inside = summed(best.astype(jnp.int32), jnp.where(shown >= 0, lowest[partition] + band, -1))
            of_tile = inside * (asked - overview)[view] // jnp.maximum(most[view], 1)
        granted = jnp.where(is_part, of_tile, jnp.where(parts > 0, overview, jnp.maximum(asked, 1)))
        return jnp.minimum(granted, size)
