"""HiRED: an image's budget goes to its partitions by what the tower sees early, and there to what it sees late.

Axes: I partitions, the whole image first, then its parts row by row · N heads of the tower · V tokens of a partition.
"""

from __future__ import annotations

import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from vlkv.observe import Observation, top
from vlkv.policies.policy import policy
from vlkv.policies.reducing import ReducingPolicy
from vlkv.tokens import Tokens


@policy
class HiRED(ReducingPolicy):
    """Keeps the tokens of each partition that the class token attends to most in the last block (Arif et al. 2024).

    Every partition has a budget of its own. A whole image, as in LLaVA-1.5, is one partition and keeps floor(keep x
    its tokens), at least one. An image in parts (`choose`) gives `alpha` of its budget to the view of the whole; the
    parts share the rest by the class token's attention to their cells of that view, in the tower's first block. Shares
    are rounded down, so that a few tokens may be lost; what is left stays in raster order and keeps its positions.

    The published code cuts the raster list of the view into bands of equal length in place of cells, and pays a band
    by how many of the V (1 - alpha) most attended tokens lie in it, not by their attention.

    Attributes:
        alpha: share of the view of the whole image.
        variant: "released" partitions as the published code does.
    """

    alpha: float = 0.5
    variant: Literal["paper", "released"] = "paper"
    paper = (
        "Arif et al. 2024, HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution"
        " Vision-Language Models"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", 0 <= self.alpha < 1, "must lie in [0, 1)")
        self.check("variant", self.variant in ("paper", "released"), 'must be "paper" or "released"')

    def reductions(self, layers: int) -> tuple[int, ...]:
        """Before the first layer."""
        del layers
        return (0,)

    @property
    def watches(self) -> tuple[int, ...]:
        """The last block that runs; a whole image has no budget to share out, so the first is not asked."""
        return (-1,)

    def survivors(self, most: int) -> Int[Array, " counts"]:
        """Rounded down, at least one: what an image of 0..most tokens keeps."""
        counts = np.arange(most + 1)
        return jnp.asarray(np.minimum(counts, np.maximum(1, np.floor(self.last_keep * counts))).astype(np.int32))

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        """Most is left where all images but one consist of a single token."""
        del stage
        single = max(images, 1) - 1
        return min(vision, single + max(1, math.ceil(self.last_keep * (vision - single))))

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Bool[Array, " T"]]:
        """The best of each image."""
        del obs, stage
        assert tokens.tower is not None
        vision = tokens.valid & tokens.is_vision
        length = vision.shape[0]
        image = jnp.where(vision, tokens.grid[:, 0], length)
        attention = jnp.mean(tokens.tower[-1], axis=0)
        best_first = jnp.lexsort((-attention, image))
        ordered = image[best_first]
        rank = jnp.arange(length) - jnp.searchsorted(ordered, ordered)
        size = jnp.zeros(length + 1, jnp.int32).at[image].add(1)[ordered]
        kept = jnp.zeros(length, bool).at[best_first].set(rank < self.survivors(length)[size])
        return tokens, tokens.valid & (~tokens.is_vision | kept)

    def choose(
        self, first: Float[Array, "I N _tokens"], late: Float[Array, "I N _tokens"], *, rows: int, columns: int
    ) -> Bool[Array, "I _V"]:
        """What an image of rows x columns parts keeps of each partition.

        Args:
            first: the class token's row of attention in the first block, its own share before the V tokens'.
            late: the same in the last block that runs.
            rows: parts from top to bottom.
            columns: parts from left to right.
        """
        share = cell_budgets if self.variant == "paper" else band_budgets
        granted = share(first[0], rows=rows, columns=columns, keep=self.last_keep, alpha=self.alpha)
        attention = jnp.mean(late, axis=1)[:, 1:]
        return top(attention, jnp.ones(attention.shape, bool), granted)


def cell_budgets(
    whole: Float[Array, "N _tokens"], *, rows: int, columns: int, keep: float, alpha: float
) -> Int[Array, " I"]:
    """Budgets by the attention in the cells of the view, which is square; of sides that differ the first are longer.

    Args:
        whole: the class token's row for the view of the whole image, its own share first.
        rows: parts from top to bottom.
        columns: parts from left to right.
        keep: fraction of all partitions' tokens that is kept.
        alpha: share of the view.
    """
    attention = jnp.mean(whole, axis=0)[1:]
    count, side = attention.shape[0], math.isqrt(attention.shape[0])
    bands = jnp.array_split(attention.reshape(side, side), rows, axis=0)
    area = jnp.stack([jnp.sum(cell) for band in bands for cell in jnp.array_split(band, columns, axis=1)])
    view, rest = split(keep * count * (1 + rows * columns), alpha)
    parts = jnp.floor(rest * (area / jnp.sum(area))).astype(jnp.int32)
    return jnp.minimum(jnp.concatenate([jnp.array([view], jnp.int32), parts]), count)


def band_budgets(
    whole: Float[Array, "N _tokens"], *, rows: int, columns: int, keep: float, alpha: float
) -> Int[Array, " I"]:
    """Budgets as in the published code, by the most attended tokens in each run of the raster list; as above."""
    attention = jnp.mean(whole, axis=0, keepdims=True)[:, 1:]
    count, parts = attention.shape[1], rows * columns
    asked = int(count * (1 - alpha))
    best = top(attention, jnp.ones(attention.shape, bool), jnp.array([asked]))[0]
    inside = jnp.stack([jnp.sum(band) for band in jnp.array_split(best, parts)])
    view, rest = split(keep * count * (1 + parts), alpha)
    table = np.floor(np.arange(count + 1) / max(asked, 1) * rest).astype(np.int32)
    return jnp.minimum(jnp.concatenate([jnp.array([view], jnp.int32), jnp.asarray(table)[inside]]), count)


def split(total: float, alpha: float) -> tuple[int, int]:
    """What the view gets of a budget, rounded down, and what is left of it for the parts."""
    view = int(alpha * int(total))
    return view, int(total) - view
