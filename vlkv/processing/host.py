"""The base classes of all families' configs, which convert pictures and prompts to arrays on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.processing.arranging import Arranged, Batch, Mask, Tokens, count_up, padded, zeros
from vlkv.processing.pictures import Pictures, SquarePictures
from vlkv.processing.pixels import CLIP, KINDS, Kinds, Layout, PixelSettings, find_settings
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
        return self.squares(find_settings(folder, self.kinds, self.kind).pixels(layout))

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
