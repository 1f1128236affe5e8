"""Where each vision token comes from and where it lies: what families share. Host side, numpy only.

Axes: B batch · T tokens · A position axes · V vision tokens of a picture · I pictures, tiles or frames of the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.processing.pictures import Pictures, SquarePictures
from vlkv.processing.pixels import KINDS, Kinds, Layout, PixelSettings, read_settings
from vlkv.processing.templates import ChatTemplate

Batch = Mapping[str, Any]
Tokens = Int[np.ndarray, "B T"]
Mask = Bool[np.ndarray, "B T"]

PICTURE = (480, 640)  # height and width in pixels of a sample, for families whose tokens depend on them
# Sources of embeddings that are no patch: the family's newline, and below it others that it numbers itself.
NEWLINE, OTHERS = -1, -2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arranged:
    """One batch, on the host. `pixels` and `layout` are padded to buckets; the rest is not yet."""

    vision_index: Int[np.ndarray, "B T"]  # row of the batch's flat vision embeddings; -1: text
    grid: Int[np.ndarray, "B T 3"]  # number of its image in the row, line and column of its patch; -1: on no grid
    positions: Int[np.ndarray, "B T A"]  # what RoPE sees
    pixels: np.ndarray | None = None
    layout: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # what the wiring must know of the pixels
    parts: Int[np.ndarray, "B T 2"] | None = None  # of pictures that are cut into tiles; see `Inputs`
    max_vision: int = 0  # bound on the vision tokens of any row
    max_images: int = 0  # bound on the images of any row


class TextInputs(ModelConfig):
    """The host's part of a model without a tower, and what other families override."""

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures | None:
        """What reads the pictures of a checkpoint folder; None for a model without a tower.

        Raises:
            InputError: settings in the folder, or a layout, that are not honoured.
        """
        del folder, layout
        return None

    def template(self, folder: Path) -> ChatTemplate | None:
        """How a conversation is written; None: as the first LLaVA, or the bare text."""
        return ChatTemplate.from_folder(folder)

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """From what transformers' processor of the family returns; raises InputError where that does not match."""
        del buckets
        if batch.get("pixel_values") is not None:
            raise InputError("the model has no vision tower and cannot be given pixel_values")
        nowhere = np.full((*tokens.shape, 3), -1, np.int32)
        return Arranged(vision_index=nowhere[..., 0], grid=nowhere, positions=count_up(valid))

    def only_checkpoint(self, layout: Layout) -> None:
        """Raises InputError for a way to lay out pictures that is for models with square pictures alone."""
        if layout != "checkpoint":
            raise InputError(f"layout={layout!r} is not for {self.family}, which has its own; leave it out")


class SquareInputs(TextInputs):
    """Every picture, or tile of one, is one square of `side` x `side` tokens in raster order.

    They may stand behind `first` tokens that lie on no grid, such as a class token.
    """

    kinds: ClassVar[Kinds] = KINDS  # of image processors

    @property
    def side(self) -> int:
        """Tokens per side."""
        return self.vision.grid

    @property
    def first(self) -> int:
        """Tokens before them."""
        return self.vision.keep_class_token

    @property
    def per_picture(self) -> int:
        """Tokens of a picture, or of a tile."""
        return self.side**2 + self.first

    def open_pictures(self, folder: Path, layout: Layout) -> Pictures:
        """One square each, as the folder's settings say."""
        return self.squares(read_settings(folder, layout, self.kinds))

    def squares(self, settings: PixelSettings) -> SquarePictures:
        """A reader of pictures that become one square each."""
        return SquarePictures(settings=settings, side=self.vision.image_size, tokens=self.per_picture)

    def arrange(self, batch: Batch, tokens: Tokens, valid: Mask, buckets: Buckets) -> Arranged:
        """From `pixel_values` [I, 3, h, w], the pictures or tiles of the whole batch in the prompts' order."""
        given, each = batch.get("pixel_values"), self.per_picture
        pixels = None if given is None else np.asarray(given, np.float32)
        is_vision, count = valid & (tokens == self.image_token), 0 if pixels is None else len(pixels)
        if is_vision.sum() != count * each or (is_vision.sum(axis=1) % each).any():
            raise InputError(
                f"the prompt holds {is_vision.sum()} image tokens, but {count} image(s) or tile(s) of {each} tokens "
                f"need {count * each}: give one <image> mark per image"
            )
        if pixels is not None:
            size = self.vision.image_size
            if pixels.shape[1:] != (3, size, size):
                raise InputError(f"pixel_values have shape {pixels.shape}, expected [images, 3, {size}, {size}]")
            pixels = padded(pixels, round_up(count, buckets.images))
        most = round_up(int(is_vision.sum(axis=1).max()) // each, buckets.images)
        picture, place = np.divmod(np.cumsum(is_vision, axis=1) - 1, each)
        line, column = np.where(place >= self.first, np.divmod(place - self.first, self.side), -1)
        grid = np.where(is_vision[..., None], np.stack([picture, line, column], axis=-1), -1).astype(np.int32)
        index = np.where(is_vision, np.cumsum(is_vision.ravel()).reshape(is_vision.shape) - 1, -1).astype(np.int32)
        return Arranged(
            vision_index=index, grid=grid, positions=count_up(valid), pixels=pixels if count else None,
            max_vision=most * each, max_images=most,
        )  # fmt: skip

    def sample(self, pictures: int, room: int) -> tuple[dict[str, Any], int]:
        """Pictures of one size and one number of tokens."""
        del room
        size = self.vision.image_size
        return {"pixel_values": zeros(pictures, 3, size, size)}, pictures * self.per_picture


def zeros(*shape: int) -> Float[np.ndarray, ...]:
    """An array of zeros that takes no memory."""
    return np.broadcast_to(np.float32(0), shape)


def padded(array: np.ndarray, count: int) -> np.ndarray:
    """The array with zeros behind it, `count` entries in all."""
    return np.pad(array, [(0, count - len(array)), *[(0, 0)] * (array.ndim - 1)])


def count_up(valid: Mask) -> Int[np.ndarray, "B T 1"]:
    """Positions 0, 1, 2... of the valid tokens of each row, on either side of padding."""
    return np.maximum(np.cumsum(valid, axis=1) - 1, 0).astype(np.int32)[..., None]


def cells(side: int, lines: int, columns: int) -> Int[np.ndarray, "side side"]:
    """The cell of each place of a square that is cut into lines x columns, of sides that differ the first longer."""
    line, column = (np.repeat(np.arange(n), [len(x) for x in np.array_split(range(side), n)]) for n in (lines, columns))
    return line[:, None] * columns + column


def parts_of(
    vision_index: Int[np.ndarray, "B T"], tile: Int[np.ndarray, " R"], shown: Int[np.ndarray, " R"]
) -> Int[np.ndarray, "B T 2"]:
    """`Inputs.parts`: the tiles of a batch, numbered from 0 in every row.

    Args:
        vision_index: row of the flat vision embeddings of each token; -1: text.
        tile: number of the tile of each flat embedding, the tiles of a row one after the other; -1: none.
        shown: for those of a view of the whole picture, the tile that shows the same place; -1: none.
    """
    found = np.where(vision_index[..., None] >= 0, np.stack([tile, shown], axis=-1)[vision_index], -1)
    least = np.where(found < 0, len(tile), found).min(axis=(1, 2), keepdims=True)
    return np.where(found < 0, -1, found - least).astype(np.int32)


def entries(
    field: Int[np.ndarray, "lines columns"], number: int, newline: Literal["line", "end", "none"] = "none"
) -> Int[np.ndarray, "V 4"]:
    """The vision tokens of one view of a picture: source, number of the view, line, column.

    Args:
        field: the source of each token in its lines and columns.
        number: of the view.
        newline: where newline tokens stand: after every line, after the last, nowhere. They lie on no grid.
    """
    places = np.stack([field, np.full(field.shape, number), *np.indices(field.shape)], axis=-1)
    end = np.array([NEWLINE, number, -1, -1])
    if newline == "line":
        places = np.concatenate([places, np.broadcast_to(end, (len(field), 1, 4))], axis=1)
    places = places.reshape(-1, 4)
    return np.concatenate([places, end[None]]) if newline == "end" else places


def arrange_entries(
    tokens: Tokens,
    valid: Mask,
    made: Mapping[int | None, Sequence[Int[np.ndarray, "V columns"]]],
    buckets: Buckets,
    *,
    newline: int = 0,
    others: int = 0,
) -> tuple[dict[str, Any], Int[np.ndarray, "B T more"]]:
    """The fields of `Arranged`, besides pixels and layout, for pictures whose tokens are listed one by one.

    And what `made` says of each token beyond its four first numbers; zeros for text.

    Args:
        tokens: ids.
        valid: which of them are no padding.
        made: token of a kind of picture -> `entries` of each such picture, in the order of the prompts.
        buckets: for the bounds.
        newline: row of the newline among the flat embeddings.
        others: row of the first of those that are numbered from `OTHERS` downwards.

    Raises:
        InputError: image tokens and pictures that do not match.
    """
    is_vision = valid & np.isin(tokens, [token for token in made if token is not None])
    left = {token: iter(some) for token, some in made.items()}
    every = [one for some in made.values() for one in some]
    wanted, given = int(is_vision.sum()), sum(map(len, every))
    if wanted != given:
        raise InputError(f"the prompt holds {wanted} image tokens, but {len(every)} image(s) or video(s): the pictures "
                         f"need {given}; give one <image> mark per image, <video> per video")  # fmt: skip
    entry, most = np.zeros((*tokens.shape, every[0].shape[1] if every else 4), np.int64), 0
    for row in range(len(tokens)):
        places, views, at = np.flatnonzero(is_vision[row]), 0, 0
        while at < len(places):
            token = int(tokens[row, places[at]])
            one = next(left[token], None)
            span = places[at : at + (0 if one is None else len(one))]
            if one is None or len(span) < len(one) or (tokens[row, span] != token).any():
                raise InputError(f"row {row} of the prompt: its image tokens do not end where its pictures do; "
                                 "repeat each picture's token once per vision token")  # fmt: skip
            entry[row, span] = one
            entry[row, span, 1] += views
            views += int(one[:, 1].max()) + 1
            at += len(one)
        most = max(most, views)
    source = entry[..., 0]
    source = np.where(source >= 0, source, np.where(source == NEWLINE, newline, others + OTHERS - source))
    fields = dict(
        vision_index=np.where(is_vision, source, -1).astype(np.int32),
        grid=np.where(is_vision[..., None], entry[..., 1:4], -1).astype(np.int32),
        positions=count_up(valid),
        max_vision=round_up(int(is_vision.sum(axis=1).max()), buckets.vision),
        max_images=round_up(most, buckets.images),
    )
    return fields, entry[..., 4:]
