"""The base classes of all families' configs, which convert pictures and prompts to arrays on the host.

Of images in square tiles, every tile and every view of the whole image is a separate image in `Inputs.grid`, because
the tower sees each of them alone and no token contains the position of a tile. Our processors add `pixel_tiles` and
`pixel_frames`; those of transformers do not. `Inputs.tiles`, for methods that divide a budget among the tiles of an
image, follows from the first, and `Inputs.frame`, for methods that compare the frames of a video, from the second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float
from typing_extensions import override

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, cells, count_up, padded, tile_numbers, zeros
from vlkv.processing.pictures import Pictures, SquarePictures
from vlkv.processing.pixels import CLIP, KINDS, Kinds, Layout, PixelSettings, read_settings
from vlkv.processing.templates import ChatTemplate


class HostConfig(ModelConfig):
    """Config of a model without a tower. Families with a tower override its methods, which do the work on the host."""

    # The documented format of the family's prompts as a chat template, for folders without one. None: it has several.
    prompt_format: ClassVar[str | None] = None

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures | None:
        """The converter from pictures to arrays, with a checkpoint folder's settings; None for a model without a tower.

        Raises InputError if settings in the folder, or the layout, are not supported.
        """
        return None

    def template(self, folder: Path) -> ChatTemplate | None:
        """The chat template of a checkpoint folder, else the family's `prompt_format`.

        None: a text model without a template, whose prompts are plain text. Raises InputError if the folder has no
        template, and the family's format depends on the checkpoint.
        """
        template = ChatTemplate.from_folder(folder)
        if template is not None or self.vision is None:
            return template
        if self.prompt_format is None:
            raise InputError(f"{folder}: no chat template, and the format of {self.family} depends on the checkpoint; "
                             "copy chat_template.jinja or chat_template.json from its source")  # fmt: skip
        return ChatTemplate.from_text(self.prompt_format, f"the prompt format of {self.family}")

    @override
    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        if batch.get("pixel_values") is not None:
            raise InputError("the model has no vision tower and cannot be given pixel_values")
        none = np.full((*tokens.shape, 3), -1, np.int32)
        return Arranged(vision_index=none[..., 0], grid=none, positions=count_up(valid))

    def check_layout(self, layout: Layout, *supported: Layout) -> None:
        """Raises InputError for a layout that is neither that of the checkpoint nor one of `supported`."""
        if layout not in ("checkpoint", *supported):
            raise InputError(f"layout={layout!r} is not supported for {self.family}; leave it out")


class SquareConfig(HostConfig):
    """Every image, or every tile, becomes a class token (if the tower keeps it) and `side` x `side` tokens."""

    kinds: ClassVar[Kinds] = KINDS  # of image processors
    kind: ClassVar[str] = CLIP  # the one of a file that names none

    @property
    def side(self) -> int:
        """Vision tokens per side."""
        return self.vision.grid

    @property
    def per_picture(self) -> int:
        """Vision tokens of an image, or of a tile."""
        return self.side**2 + self.vision.keep_class_token

    @override
    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        self.check_layout(layout, "pad")
        return self.squares(read_settings(folder, layout, self.kinds, self.kind))

    def squares(self, settings: PixelSettings) -> SquarePictures:
        """The converter for images that become one square each, with the given settings."""
        return SquarePictures(settings=settings, side=self.vision.image_size, tokens=self.per_picture)

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """Like `ModelConfig.arrange`. `batch` has `pixel_values` [I, 3, h, w] of all images or tiles, in order."""
        images, each = batch.get("pixel_values"), self.per_picture
        pixels = None if images is None else np.asarray(images, np.float32)
        is_vision, count = valid & (tokens == self.image_token), 0 if pixels is None else len(pixels)
        if is_vision.sum() != count * each or (is_vision.sum(axis=1) % each).any():
            raise InputError(
                f"the prompt has {is_vision.sum()} image tokens, but {count} image(s) or tile(s) of {each} tokens "
                f"need {count * each}: give one <image> mark per image"
            )
        if pixels is not None:
            size = self.vision.image_size
            if pixels.shape[1:] != (3, size, size):
                raise InputError(f"pixel_values have shape {pixels.shape}, expected [images, 3, {size}, {size}]")
            pixels = padded(pixels, round_up(count, buckets.images))
        most = round_up(int(is_vision.sum(axis=1).max()) // each, buckets.images)
        picture, number = np.divmod(np.cumsum(is_vision, axis=1) - 1, each)  # the number of a token in its picture
        special = each - self.side**2  # class tokens, which come first and have no line and column
        line, column = np.where(number >= special, np.divmod(number - special, self.side), -1)
        grid = np.where(is_vision[..., None], np.stack([picture, line, column], axis=-1), -1).astype(np.int32)
        index = np.where(is_vision, np.cumsum(is_vision.ravel()).reshape(is_vision.shape) - 1, -1).astype(np.int32)
        return Arranged(
            vision_index=index, grid=grid, positions=count_up(valid), pixels=pixels if count else None,
            max_vision=most * each, max_images=most,
        )  # fmt: skip

    @override
    def sample(self, pictures: int, max_tokens: int) -> tuple[dict[str, Any], int]:
        size = self.vision.image_size
        return {"pixel_values": zeros(pictures, 3, size, size)}, pictures * self.per_picture


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
