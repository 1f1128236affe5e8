"""Qwen2-VL and Qwen2.5-VL: images of any size, videos, and a position on three axes.

The tower sees frames: an image is one, a video one for every two pictures. Every token of a frame counts as vision and
lies on the frame's own grid, so that to a policy with windows a video is so many images. The marks around an image
(<|vision_start|>, <|vision_end|>) are text, on no grid.

A frame's patches keep the checkpoint's order, merge x merge of a token side by side. Where the tower has windows, each
lies in places of its own, as many as a whole one has, so that a reshape cuts them; the rest is padding.

Axes: B batch · T tokens · F frames of the batch · n places for the patches of a frame · C values of a patch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig, QwenVisionConfig
from vlkv.errors import InputError
from vlkv.layouts.arranged import Arranged

_FIELDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


@dataclasses.dataclass(frozen=True)
class _Picture:
    """An image or a video."""

    patches: Float[np.ndarray, "frames patches C"]
    lines: int  # of tokens, as are columns
    columns: int
    interval: float  # from frame to frame, in temporal positions

    @property
    def tokens(self) -> int:
        return len(self.patches) * self.lines * self.columns

    def coordinates(self) -> Int[np.ndarray, "V 3"]:
        """Frame, line and column of each token, in the order of the prompt."""
        return np.indices((len(self.patches), self.lines, self.columns)).reshape(3, -1).T

    def positions(self) -> Int[np.ndarray, "V 3"]:
        """The same as M-RoPE counts them. In float32 before truncation, as transformers computes it."""
        at = self.coordinates()
        at[:, 0] = (at[:, 0].astype(np.float32) * np.float32(self.interval)).astype(np.int64)
        return at


def arrange(
    batch: Mapping[str, Any],
    tokens: Int[np.ndarray, "B T"],
    valid: Bool[np.ndarray, "B T"],
    config: ModelConfig,
    buckets: Buckets,
) -> Arranged:
    """From `pixel_values` [patches, C] and `image_grid_thw` [images, 3], the same of videos, `second_per_grid_ts`.

    `layout["place"]` [F, n, 2] is the line and column of each patch, -1 for padding. Text after a picture goes on from
    the greatest position of all axes plus one (Qwen2-VL, Sec. 2.1; transformers 4). transformers 5.23 leaves the
    temporal axis out of that, which differs for videos that are longer than their frames are high and wide.

    Raises:
        InputError: image or video tokens, pixels and grids that do not match.
    """
    c = config.vision
    assert isinstance(c, QwenVisionConfig)
    pictures = {kind: _pictures(batch, kind, c) for kind in _FIELDS}
    left = {kind: iter(some) for kind, some in pictures.items()}
    seen: list[_Picture] = []
    frame = np.full(tokens.shape, -1, np.int64)  # of the batch
    grid = np.full((*tokens.shape, 3), -1, np.int32)
    positions = np.zeros((*tokens.shape, 3), np.int32)
    frames = 0
    for row, mask in enumerate(valid):
        first, following, places = frames, 0, np.flatnonzero(mask)
        for picture, part in _runs(tokens[row, places], config, left):
            here = places[part]
            if picture is None:
                positions[row, here] = following + np.arange(len(here))[:, None]
            else:
                at = picture.coordinates()
                frame[row, here] = frames + at[:, 0]
                grid[row, here] = at + np.array([frames - first, 0, 0])
                positions[row, here] = following + picture.positions()
                frames += len(picture.patches)
                seen.append(picture)
            following = int(positions[row, here].max()) + 1
    for kind, some in left.items():
        spare = sum(1 for _ in some)
        if spare:
            raise InputError(f"the prompt holds the {kind} tokens of {len(pictures[kind]) - spare} {kind}(s), but "
                             f"there are pixels of {len(pictures[kind])}")  # fmt: skip
    counts = np.where(frame >= 0, grid[..., 0], -1).max(axis=1) + 1  # frames of each row
    max_vision = round_up(int((frame >= 0).sum(axis=1).max()), buckets.vision)
    max_images = round_up(int(counts.max()), buckets.images)
    if not seen:
        return Arranged(vision_index=np.full(tokens.shape, -1, np.int32), grid=grid, positions=positions, pixels=None,
                        max_vision=max_vision, max_images=max_images)  # fmt: skip
    pixels, place, slots = _lay_out(seen, c, buckets)
    return Arranged(
        vision_index=np.where(frame >= 0, slots[frame, grid[..., 1], grid[..., 2]], -1).astype(np.int32),
        grid=grid, positions=positions, pixels=pixels, layout={"place": place}, max_vision=max_vision,
        max_images=max_images,
    )  # fmt: skip


def _pictures(batch: Mapping[str, Any], kind: str, c: QwenVisionConfig) -> list[_Picture]:
    """All pictures of one kind, in their order."""
    name, grid_name = _FIELDS[kind]
    pixels = batch.get(name)
    if pixels is None:
        return []
    if batch.get(grid_name) is None:
        raise InputError(f"inputs have {name} but no {grid_name}")
    pixels, grids = np.asarray(pixels, np.float32), np.asarray(batch[grid_name])
    if grids.ndim != 2 or grids.shape[1] != 3 or (grids < 1).any() or (grids[:, 1:] % c.merge).any():
        raise InputError(f"{grid_name} must be [{kind}s, 3]: frames, lines and columns, the last two multiples "
                         f"of {c.merge}")  # fmt: skip
    want = (int(grids.prod(axis=1).sum()), c.patch_values)
    if pixels.shape != want:
        raise InputError(f"{name} have shape {pixels.shape}, expected [{want[0]}, {want[1]}] from {grid_name}")
    given = None if kind == "image" else batch.get("second_per_grid_ts")
    seconds = np.ones(len(grids)) if given is None else np.asarray(given, np.float64)
    if seconds.shape != (len(grids),):
        raise InputError(f"second_per_grid_ts has shape {seconds.shape}, {grid_name} {grids.shape}")
    if c.whole_seconds:
        seconds = np.trunc(seconds)
    speed = None if kind == "image" else c.tokens_per_second
    intervals = np.ones(len(grids)) if speed is None else speed * seconds
    ends = np.cumsum(grids.prod(axis=1))
    return [
        _Picture(part.reshape(int(t), -1, c.patch_values), int(h) // c.merge, int(w) // c.merge, float(interval))
        for part, (t, h, w), interval in zip(np.split(pixels, ends[:-1]), grids, intervals, strict=True)
    ]


def _runs(
    ids: Int[np.ndarray, " T"], config: ModelConfig, left: Mapping[str, Iterator[_Picture]]
) -> Iterator[tuple[_Picture | None, slice]]:
    """A row in pieces: each picture and where its tokens are; None for a stretch of text."""
    marks: dict[Any, str] = {config.image_token: "image", config.video_token: "video"}
    at = 0
    while at < len(ids):
        kind = marks.get(int(ids[at]))
        if kind is None:
            marked = np.flatnonzero(np.isin(ids[at:], list(marks)))
            end = at + int(marked[0]) if len(marked) else len(ids)
            yield None, slice(at, end)
        else:
            picture = next(left[kind], None)
            if picture is None:
                raise InputError(f"the prompt holds {kind} tokens beyond the pixels given: one picture for each mark")
            end = at + picture.tokens
            if end > len(ids) or (ids[at:end] != ids[at]).any():
                raise InputError(f"a picture of {picture.tokens} tokens stands at token {at} of its prompt, which has "
                                 f"fewer {kind} tokens there")  # fmt: skip
            yield picture, slice(at, end)
        at = end


def _lay_out(
    pictures: list[_Picture], c: QwenVisionConfig, buckets: Buckets
) -> tuple[Float[np.ndarray, "F n C"], Int[np.ndarray, "F n 2"], Int[np.ndarray, "F lines columns"]]:
    """Pixels and places, padded, and which row of the flat vision embeddings each token is."""
    unit = c.merge**2
    slots = [_slots(p.lines, p.columns, c.window) for p in pictures]
    whole = unit * (c.window or 1) ** 2  # a window is whole even where the picture ends in it
    n = -(-max(int(s.max()) + 1 for s in slots) * unit // whole) * whole
    n = -(-round_up(n, buckets.patches) // whole) * whole
    frames = round_up(sum(len(p.patches) for p in pictures), buckets.images)
    pixels = np.zeros((frames, n, c.patch_values), np.float32)
    place = np.full((frames, n, 2), -1, np.int32)
    index = np.zeros((frames, max(p.lines for p in pictures), max(p.columns for p in pictures)), np.int64)
    within = np.indices((c.merge, c.merge)).reshape(2, -1).T  # [unit, 2]
    at = 0
    for picture, slot in zip(pictures, slots, strict=True):
        patch = (slot.reshape(-1, 1) * unit + np.arange(unit)).ravel()
        token = np.indices((picture.lines, picture.columns)).reshape(2, -1).T
        where = (token[:, None] * c.merge + within).reshape(-1, 2)
        for patches in picture.patches:
            pixels[at, patch], place[at, patch] = patches, where
            index[at, : picture.lines, : picture.columns] = slot + at * (n // unit)
            at += 1
    return pixels, place, index


def _slots(lines: int, columns: int, window: int | None) -> Int[np.ndarray, "lines columns"]:
    """Where each token of a frame lies: in raster order, or window by window."""
    line, column = np.indices((lines, columns))
    if window is None:
        return line * columns + column
    across = -(-columns // window)
    return ((line // window * across + column // window) * window + line % window) * window + column % window
