"""A video without an end: its frames become groups of tokens whose arrays always have the same shapes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import PIL.Image

from vlkv.buckets import Buckets
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing.images import Picture, open_image
from vlkv.processing.pictures import Video, checked_fps
from vlkv.processing.processor import Processor

Frames: TypeAlias = Picture | Iterable[Picture]  # also an array [frames, height, width, 3]
_LATER = 10**7  # seconds: no video has longer times in its prompt before it has run for months


class Watching:
    """Collects the frames of one video, and makes inputs for `vlkv.extend` of each group.

    Times in the text of prompts continue over the whole video. Positions continue within a segment: the frames between
    two questions, which are one video in the prompt.
    """

    def __init__(self, processor: Processor, fps: float, group: int, reduce: Any = None) -> None:
        if not isinstance(group, int) or isinstance(group, bool) or group < 1:
            raise InputError(f"group={group!r} must be a whole number of frames, at least 1")
        self._processor, self._fps, self._group, self.reduce = processor, checked_fps(fps), group, reduce
        self.waiting: list[PIL.Image.Image] = []  # fewer than a group
        self._shown = self._begin = 0  # frames that have become inputs: of the whole video, and of this segment
        self._buckets: Buckets | None = None  # one size of each kind, that of the first group

    def require_same(self, fps: float, group: int, reduce: Any) -> None:
        """Raises InputError unless these are the options of the first call."""
        if (fps, group, reduce) != (self._fps, self._group, self.reduce):
            raise InputError(f"the video is watched with fps={self._fps}, group={self._group} and reduce="
                             f"{type(self.reduce).__name__ if self.reduce else None}: give the same again")  # fmt: skip

    def groups(self, frames: Frames) -> Iterator[Inputs]:
        """Adds frames, and yields the inputs of each group that is complete."""
        for frame in _each(frames):
            self.waiting.append(open_image(frame))  # a copy: a camera may write the next frame into the same array
            if len(self.waiting) == self._group:
                yield self._next()

    def rest(self) -> Iterator[Inputs]:
        """Yields the inputs of the frames that wait for a group to be complete, and ends the segment."""
        if self.waiting:
            yield self._next()
        self._begin = 0

    def _next(self) -> Inputs:
        frames, self.waiting = self.waiting, []
        inputs = self._inputs(frames, self._shown, self._begin)
        self._shown += len(frames)
        self._begin += len(frames)
        return inputs

    def _inputs(self, frames: Sequence[PIL.Image.Image], shown: int, begin: int) -> Inputs:
        times = [(shown + i) / self._fps for i in range(len(frames))]
        video = Video(frames=frames, fps=self._fps, times=times, begin=begin)
        if self._buckets is None:
            # The remainder of a group is padded to the shapes of a whole one, and so are shorter times.
            whole = (list(frames) * self._group)[: self._group]
            later = [_LATER + time for time in range(self._group)]
            self._buckets = _fixed(self._processor.part(Video(whole, self._fps, later, begin=self._group)))
        return dataclasses.replace(self._processor, buckets=self._buckets).part(video)


def _fixed(inputs: Inputs) -> Buckets:
    """Buckets that round the sizes of other inputs up to those of these."""
    pixels: Any = inputs.pixels
    patches = pixels.shape[1] if pixels.ndim == 3 else 1  # only of towers of native resolution
    return Buckets(
        text=(inputs.max_text,), images=(max(inputs.max_images, len(pixels)),), vision=(inputs.max_vision,),
        patches=(patches,),
    )  # fmt: skip


def _each(frames: Frames) -> Iterable[Any]:
    """One frame, or several, one by one."""
    single = isinstance(frames, str | bytes | os.PathLike) or (isinstance(frames, np.ndarray) and frames.ndim < 4)
    return [frames] if single or not isinstance(frames, Iterable) else frames
