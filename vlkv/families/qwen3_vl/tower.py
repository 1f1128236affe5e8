"""The vision tower of Qwen3-VL: that of Qwen2-VL with a learnt table of positions, besides its rotary embedding.

Axes: F frames · n patches of a frame with padding · C values of a patch · D width.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from typing_extensions import override

from vlkv.decoder.layers import Embedding, Initializer
from vlkv.families.qwen2_vl.tower import Qwen2VisionConfig, Qwen2VlTower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(Qwen2VisionConfig):
    """A tower whose patch embedding has a bias.

    Attributes:
        table: positions per side of the square table.
    """

    table: int
    aligned: ClassVar[bool] = True  # as in `corners`

    patch_bias = True


class Qwen3VlTower(Qwen2VlTower):
    """Patch embedding, positions and blocks."""

    config: Qwen3VisionConfig

    def __init__(self, c: Qwen3VisionConfig, *, init: Initializer) -> None:
        super().__init__(c, init=init)
        self.positions = Embedding(c.table**2, c.width, init=init)

    @override
    def embed(self, pixels: Float[Array, "F n C"], place: Int[Array, "F n 2"]) -> Float[Array, "F n D"]:
        index, weight = corners(place, self.config.table, aligned=self.config.aligned)
        at = jnp.einsum("fnkd,fnk->fnd", self.positions(index).astype(jnp.float32), weight)
        return self.patch(pixels) + at.astype(pixels.dtype)


def corners(
    place: Int[Array, "F n 2"], table: int, *, aligned: bool = True
) -> tuple[Int[Array, "F n 4"], Float[Array, "F n 4"]]:
    """The four entries of the table around each patch, and their weights in bilinear interpolation.

    Args:
        place: line and column of each patch, -1 for padding, whose weights mean nothing.
        table: positions per side of the table.
        aligned: True: the corner patches of a frame are at the corners of the table; False: the edges of the frame
            are at the edges of the table, beyond the centres of its entries.
    """
    last, line = jnp.max(place, axis=1, keepdims=True), jnp.maximum(place, 0).astype(jnp.float32)
    if aligned:
        at = line * (table - 1) / jnp.maximum(last, 1)  # [F, n, 2]; a single line is at the table's first one
    else:
        at = jnp.clip((line + 0.5) * table / jnp.maximum(last + 1, 1) - 0.5, 0, table - 1)
    first = jnp.floor(at).astype(jnp.int32)
    both = jnp.stack([first, jnp.minimum(first + 1, table - 1)], axis=-1)  # [F, n, 2, 2]
    share = jnp.stack([1 - (at - first), at - first], axis=-1)
    index = both[..., 0, :, None] * table + both[..., 1, None, :]
    weight = share[..., 0, :, None] * share[..., 1, None, :]
    return index.reshape(*place.shape[:2], 4), weight.reshape(*place.shape[:2], 4)
