from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from vlkv.compression.option_types import Positive
from vlkv.compression.policy import Mask, Observation, check_types
from vlkv.compression.reducing import ReducingPolicy
from vlkv.compression.tokens import Tokens


class Downsample(ReducingPolicy):
    """Averages blocks of `side` x `side` vision embeddings before the first layer.

    A compression method must beat this baseline, because it needs no selection. The mean replaces the first token of
    the block. Tokens without a grid position do not change. The model should have been trained on pooled grids; the
    demo model was. `keep` follows from `side`.

    Attributes:
        side: tokens per side of a block.
        most: bound on the vision tokens of a row after the reduction (144 for one image of 24 x 24 and side 2), for
            which the cache reserves memory. None: reserve for no reduction, because images may have any shape.
    """

    side: Positive = 2
    most: Positive | None = None
    own_keep = True

    def __post_init__(self) -> None:
        check_types(self)
        share = 1 / self.side**2
        self.check("keep", self.keep in (None, share), f"follows from side={self.side}: leave it out")
        object.__setattr__(self, "keep", share)
        super().__post_init__()

    def remaining(self, *, stage: int, vision: int, images: int) -> int:
        return vision if self.most is None else min(vision, self.most)

    def reduce(self, tokens: Tokens, obs: Observation | None, *, stage: int) -> tuple[Tokens, Mask]:
        length = tokens.valid.shape[0]
        pooled = tokens.valid & tokens.is_vision & (tokens.grid[:, 1] >= 0)
        block = jnp.where(pooled[:, None], tokens.grid // jnp.array([1, self.side, self.side]), -1)
        order = jnp.lexsort((jnp.arange(length), *block.T[::-1]))
        first = jnp.any(block[order] != jnp.roll(block[order], 1, axis=0), axis=1).at[0].set(True)
        number = jnp.zeros(length, jnp.int32).at[order].set(jnp.cumsum(first) - 1)  # of each token's block

        def total(x: Array) -> Array:
            return jax.ops.segment_sum(x, number, num_segments=length)[number]

        leads = jnp.zeros(length, bool).at[order].set(first) | ~pooled
        size = total(tokens.size)
        mean = total(tokens.x.astype(jnp.float32) * tokens.size[:, None]) / size[:, None]
        reduced = dataclasses.replace(
            tokens,
            x=jnp.where(pooled[:, None], mean.astype(tokens.x.dtype), tokens.x),
            size=jnp.where(pooled, size, tokens.size),
            grid=jnp.where(pooled[:, None], block, tokens.grid),
        )
        return reduced, tokens.valid & leads
