"""Which tokens of a prompt remain in each layer, and which patches of the image they are.

Axes: B batch · L layers · K key heads · T prompt · h, w rows and columns of patches.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from vlkv.cache.pool import PackedCache
from vlkv.generation.prompt import Prompt


def reached(prompt: Prompt) -> Bool[Array, "B L T"]:
    """Which prompt tokens each layer processed. A policy that shortens the prompt removes some (LightKV, Fig. 7)."""
    batch, length = prompt.valid.shape
    row = jnp.arange(batch)[:, None]
    blank = jnp.zeros((batch, length), bool)
    return jnp.stack([blank.at[row, r.source].max(r.valid) for r in prompt.layers], axis=1)


def held(cache: PackedCache, length: int) -> Float[Array, "B L T"]:
    """For each layer and each of the prompt's `length` tokens, the share of key heads that keep it after prefill."""
    return jnp.mean(held_by_head(cache, length), axis=2)


def held_by_head(cache: PackedCache, length: int) -> Bool[Array, "B L K T"]:
    """Which of the prompt's `length` tokens each layer and key head keeps after prefill."""
    layers, batch, heads = cache.start.shape
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[:, None]

    def layer(i: int) -> Bool[Array, "B K T"]:
        token = cache.entries(i, length)
        where = jnp.where(token >= 0, token, length)  # out of bounds, so not written
        return jnp.zeros((batch, heads, length), bool).at[row, head, where].set(True, mode="drop")

    return jnp.stack([layer(i) for i in range(layers)], axis=1)


def evidence_recall(cache: PackedCache, evidence: Bool[Array, "B T"]) -> Float[Array, "B L K"]:
    """The share of the evidence tokens that are in the cache of each row, layer and key head.

    Args:
        cache: from `prefill` or `fill_cache`.
        evidence: the prompt tokens that the answer needs; at least one in every row.
    """
    found = held_by_head(cache, evidence.shape[1]) & evidence[:, None, None]
    return jnp.sum(found, axis=-1) / jnp.sum(evidence, axis=-1)[:, None, None]


def on_grid(values: Shaped[np.ndarray, "*L T"], grid: Int[np.ndarray, "T 3"]) -> list[Float[np.ndarray, "*L h w"]]:
    """Arranges one number per token as maps of patches, one map per image; NaN where a patch has no token.

    Args:
        values: numbers for the tokens of one row.
        grid: `Inputs.grid` of this row.
    """
    values, grid = np.asarray(values, np.float32), np.asarray(grid)
    pictures = []
    for image in range(int(grid[:, 0].max(initial=-1)) + 1):
        patches = (grid[:, 0] == image) & (grid[:, 1:] >= 0).all(axis=1)
        picture = np.full((*values.shape[:-1], *(grid[patches, 1:].max(axis=0, initial=-1) + 1)), np.nan, np.float32)
        picture[..., grid[patches, 1], grid[patches, 2]] = values[..., patches]
        pictures.append(picture)
    return pictures
