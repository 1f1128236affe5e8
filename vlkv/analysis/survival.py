"""Which tokens of a prompt are left in each layer, and the patches of the image that they come from.

Axes: B batch · L layers · T prompt · I images · h, w lines and columns of patches.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from vlkv.cache import PackedCache
from vlkv.reading import Prompt


def reached(prompt: Prompt) -> Bool[Array, "B L T"]:
    """Which prompt tokens each layer computed: fewer and fewer if a policy shortened the prompt (LightKV, Fig. 7)."""
    batch, length = prompt.valid.shape
    row = jnp.arange(batch)[:, None]
    blank = jnp.zeros((batch, length), bool)
    return jnp.stack([blank.at[row, r.source].max(r.valid) for r in prompt.layers], axis=1)


def held(cache: PackedCache, length: int) -> Float[Array, "B L T"]:
    """The share of the key heads of each layer whose cache holds each of the prompt's `length` tokens."""
    return jnp.mean(held_by_head(cache, length), axis=2)


def held_by_head(cache: PackedCache, length: int) -> Bool[Array, "B L K T"]:
    """Which of the prompt's `length` tokens the cache of each layer and key head holds."""
    layers, batch, heads = cache.start.shape
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]

    def layer(i: int) -> Bool[Array, "B K T"]:
        token = cache.entries(i, length)
        where = jnp.where(token >= 0, token, length)  # past the end: not written
        return jnp.zeros((batch, heads, length), bool).at[row, head, where].set(True, mode="drop")

    return jnp.stack([layer(i) for i in range(layers)], axis=1)


def evidence_recall(cache: PackedCache, evidence: Bool[Array, "B T"]) -> Float[Array, "B L K"]:
    """The share of the evidence tokens of each row that the cache of each layer and key head holds.

    Args:
        cache: of `prefill` or `fill_cache`.
        evidence: the prompt tokens that an answer needs; at least one in every row.
    """
    found = held_by_head(cache, evidence.shape[1]) & evidence[:, None, None]
    return jnp.sum(found, axis=-1) / jnp.sum(evidence, axis=-1)[:, None, None]


def on_grid(values: Shaped[np.ndarray, "*L T"], grid: Int[np.ndarray, "T 3"]) -> list[Float[np.ndarray, "*L h w"]]:
    """Numbers per token as maps of patches, one per image of the row; NaN where an image has no token.

    Args:
        values: of the row's tokens.
        grid: of `Inputs.grid`, without the batch.
    """
    values, grid = np.asarray(values, np.float32), np.asarray(grid)
    pictures = []
    for image in range(int(grid[:, 0].max(initial=-1)) + 1):
        mine = (grid[:, 0] == image) & (grid[:, 1:] >= 0).all(axis=1)
        picture = np.full((*values.shape[:-1], *(grid[mine, 1:].max(axis=0, initial=-1) + 1)), np.nan, np.float32)
        picture[..., grid[mine, 1], grid[mine, 2]] = values[..., mine]
        pictures.append(picture)
    return pictures
