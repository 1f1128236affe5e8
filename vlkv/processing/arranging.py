"""Maps image tokens to vision embeddings, grid positions and RoPE positions. Host code in numpy that families share.

A picture is an image or a video.
Axes: B batch · T tokens · A position axes · V vision tokens of a picture · I images, tiles or frames of the batch ·
R vision embeddings of the batch in one list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.errors import InputError

Batch = Mapping[str, Any]
Tokens = Int[np.ndarray, "B T"]
Mask = Bool[np.ndarray, "B T"]

PICTURE = (480, 640)  # height and width in pixels of a sample image, for families whose tokens depend on them
# Sources in `entries` that are not patches: the newline; OTHERS, OTHERS - 1, ... are defined by the family.
NEWLINE, OTHERS = -1, -2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arranged:
    """Fields of `Inputs` for one batch. `pixels` and `layout` are padded to buckets; the other arrays are not."""

    vision_index: Int[np.ndarray, "B T"]  # index of the token's vision embedding; -1: text
    grid: Int[np.ndarray, "B T 3"]  # (image number in the prompt, line, column) of the patch; -1: none
    positions: Int[np.ndarray, "B T A"]  # of RoPE
    pixels: np.ndarray | None = None
    layout: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # further arrays for the family's model
    tiles: Int[np.ndarray, "B T 2"] | None = None  # tiles of images that are cut into tiles; see `Inputs`
    frame: Int[np.ndarray, "B T"] | None = None  # frames of videos; see `Inputs`
    max_vision: int = 0  # bound on the vision tokens of any row
    max_images: int = 0  # bound on the images of any row


def zeros(*shape: int) -> Float[np.ndarray, " ..."]:
    """A read-only array of zeros that takes no memory."""
    return np.broadcast_to(np.float32(0), shape)


def padded(array: np.ndarray, count: int) -> np.ndarray:
    """Pads the first axis with zeros to `count` entries."""
    return np.pad(array, [(0, count - len(array)), *[(0, 0)] * (array.ndim - 1)])


def count_up(valid: Mask) -> Int[np.ndarray, "B T 1"]:
    """Positions 0, 1, 2... of the valid tokens of each row; padding may be on either side."""
    return np.maximum(np.cumsum(valid, axis=1) - 1, 0).astype(np.int32)[..., None]


def longest_run(vision_index: Int[np.ndarray, "B T"]) -> int:
    """The most vision tokens of a row without text between them."""
    # The distance of each token from the last token of text at or before it.
    column = np.arange(vision_index.shape[1])
    return int((column - np.maximum.accumulate(np.where(vision_index < 0, column, -1), axis=1)).max())


def cells(side: int, lines: int, columns: int) -> Int[np.ndarray, "side side"]:
    """The cell of each patch if side x side patches are cut into lines x columns cells, as equal as possible."""
    line, column = (np.repeat(np.arange(n), [len(x) for x in np.array_split(range(side), n)]) for n in (lines, columns))
    return line[:, None] * columns + column


def tile_numbers(
    vision_index: Int[np.ndarray, "B T"], tile: Int[np.ndarray, " R"], shown: Int[np.ndarray, " R"]
) -> Int[np.ndarray, "B T 2"]:
    """`Inputs.tiles`: the tiles of a batch, numbered from 0 in every row.

    `tile` is the tile of each vision embedding, numbered in the order of the batch, and `shown`, for embeddings of an
    overview, the tile that shows the same part of the image; -1: none.
    """
    tiles = np.where(vision_index[..., None] >= 0, np.stack([tile, shown], axis=-1)[vision_index], -1)
    least = np.where(tiles < 0, len(tile), tiles).min(axis=(1, 2), keepdims=True)
    return np.where(tiles < 0, -1, tiles - least).astype(np.int32)


def entries(
    field: Int[np.ndarray, "lines columns"], number: int, newline: Literal["line", "end", "none"] = "none"
) -> Int[np.ndarray, "V 4"]:
    """The vision tokens of one view (`number`) of a picture, one row each: source, number of the view, line, column.

    `field` is the source of each token: an index of a vision embedding, or OTHERS, OTHERS - 1, ... `newline` says where
    to add newline tokens, with -1 for line and column: after every line, after the last, or nowhere.
    """
    rows = np.stack([field, np.full(field.shape, number), *np.indices(field.shape)], axis=-1)
    end = np.array([NEWLINE, number, -1, -1])
    if newline == "line":
        rows = np.concatenate([rows, np.broadcast_to(end, (len(field), 1, 4))], axis=1)
    rows = rows.reshape(-1, 4)
    return np.concatenate([rows, end[None]]) if newline == "end" else rows


def arrange_entries(
    tokens: Tokens,
    valid: Mask,
    pictures: Mapping[int | None, Sequence[Int[np.ndarray, "V columns"]]],
    buckets: Buckets,
    *,
    frames: Mapping[int | None, Sequence[int]] = MappingProxyType({}),
    newline: int = 0,
    others: int = 0,
) -> tuple[dict[str, Any], Int[np.ndarray, "B T more"]]:
    """Assigns the image and video tokens of the prompts to the tokens of the pictures, in order.

    Returns the fields of `Arranged` except pixels, layout and tiles, and the further columns of each token's entry.
    Raises InputError for image tokens and pictures that do not match.

    Args:
        pictures: id of the image or video token -> the tokens of each such picture, in the order of the prompts, as
            returned by `entries`; further columns may follow.
        frames: id of a video token -> for each picture with this token, the number in its video of its first frame.
        newline: index of the newline's vision embedding, which replaces the source NEWLINE.
        others: index of the vision embedding of the source OTHERS; OTHERS - 1 has the next index, and so on.
    """
    is_vision = valid & np.isin(tokens, [token for token in pictures if token is not None])
    queues = {
        token: zip(queue, frames.get(token, [None] * len(queue)), strict=True) for token, queue in pictures.items()
    }
    all_pictures = [picture for queue in pictures.values() for picture in queue]
    present, needed = int(is_vision.sum()), sum(map(len, all_pictures))
    if present != needed:
        raise InputError(f"the prompt has {present} image tokens, but {len(all_pictures)} image(s) or video(s) need "
                         f"{needed}; give one <image> mark per image, <video> per video")  # fmt: skip
    entry, most = np.zeros((*tokens.shape, all_pictures[0].shape[1] if all_pictures else 4), np.int64), 0
    frame = np.full(tokens.shape, -1, np.int32)
    for row in range(len(tokens)):
        columns, views, done = np.flatnonzero(is_vision[row]), 0, 0
        while done < len(columns):
            token = int(tokens[row, columns[done]])
            picture, begin = next(queues[token], (None, None))
            span = columns[done : done + (0 if picture is None else len(picture))]
            if picture is None or len(span) < len(picture) or (tokens[row, span] != token).any():
                raise InputError(f"row {row} of the batch: the image tokens do not fit the images or videos; repeat "
                                 "the token of each image or video once per vision token")  # fmt: skip
            entry[row, span] = picture
            if begin is not None:
                frame[row, span] = begin + picture[:, 1]
            entry[row, span, 1] += views  # views are numbered in the whole prompt
            views += int(picture[:, 1].max()) + 1
            done += len(picture)
        most = max(most, views)
    source = entry[..., 0]
    source = np.where(source >= 0, source, np.where(source == NEWLINE, newline, others + OTHERS - source))
    fields = dict(
        vision_index=np.where(is_vision, source, -1).astype(np.int32),
        grid=np.where(is_vision[..., None], entry[..., 1:4], -1).astype(np.int32),
        positions=count_up(valid),
        frame=frame if (frame >= 0).any() else None,
        max_vision=round_up(int(is_vision.sum(axis=1).max()), buckets.vision),
        max_images=round_up(most, buckets.images),
    )
    return fields, entry[..., 4:]
