"""The base class of configs of families whose images are square tiles.

Of images in square tiles, every tile and every view of the whole image is a separate image in `Inputs.grid`, because
the tower sees each of them alone and no token contains the position of a tile. Our processors add `pixel_tiles` and
`pixel_frames`; those of transformers do not. `Inputs.tiles`, for methods that divide a budget among the tiles of an
image, follows from the first, and `Inputs.frame`, for methods that compare the frames of a video, from the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from vlkv.buckets import Buckets
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, cells, tile_numbers
from vlkv.processing.host import SquareConfig


class TilesConfig(SquareConfig):
    """Images as tiles. `wiring.merge` is the number of patches per side that become one vision token."""

    @property
    @override
    def side(self) -> int:
        return self.vision.grid // self.wiring.merge

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `SquareConfig.arrange`. `batch` may also have `pixel_tiles` [I, 2] and `pixel_frames` [I].

        `pixel_tiles`: for a thumbnail, the lines and columns of the tiles before it; for a tile, zeros. `pixel_frames`:
        for a frame of a video, its number in the video, from 0; for a tile or a thumbnail, -1.
        """
        arranged = super().arrange(batch, tokens, valid, buckets)
        numbers = np.asarray(batch.get("pixel_frames", -1))
        if (numbers >= 0).any():
            of_embedding, index = np.repeat(numbers, self.per_picture), arranged.vision_index
            frame = np.where(index >= 0, of_embedding[index], -1).astype(np.int32)
            arranged = dataclasses.replace(arranged, frame=frame)
        if batch.get("pixel_tiles") is None:
            return arranged
        tilings = np.asarray(batch["pixel_tiles"])
        # For each token of a thumbnail, the number of the tile that shows the same part of the image.
        shown = np.full((len(tilings), self.per_picture), -1)
        for view in np.flatnonzero(tilings.prod(axis=1)):
            shown[view] = view - tilings[view].prod() + cells(self.side, *tilings[view]).ravel()
        tile = np.repeat(np.arange(len(tilings)), self.per_picture)
        return dataclasses.replace(arranged, tiles=tile_numbers(arranged.vision_index, tile, shown.ravel()))


def tile_arrays(
    tiles: Sequence[Float[np.ndarray, "3 side side"]], view: tuple[int, int] = (0, 0), *, is_video: bool = False
) -> dict[str, np.ndarray]:
    """The arrays of one image or video (`is_video`), as `TilesConfig.arrange` gets them.

    `view`: lines and columns of the tiles before the last one, if this is a view of the whole image.
    """
    return {
        "pixel_values": np.stack(tiles),
        "pixel_tiles": np.array([*[(0, 0)] * (len(tiles) - 1), view]),
        "pixel_frames": np.arange(len(tiles)) if is_video else np.full(len(tiles), -1),
    }
