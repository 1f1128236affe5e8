"""Converts images and videos to arrays: the interface, images that become one square, and files of videos."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeAlias

import numpy as np
import PIL.Image
from jaxtyping import Float
from typing_extensions import override

from vlkv.errors import InputError
from vlkv.processing.images import Picture, open_image
from vlkv.processing.pixels import PixelSettings, to_pixels


@dataclasses.dataclass(frozen=True)
class Video:
    """The frames of a video that the model processes, in order.

    `read_video` decodes a video file with PyAV and chooses frames.

    Attributes:
        frames: pictures; also an iterator of them, or an array [frames, height, width, 3].
        fps: frames per second of `frames`. If they were chosen from a video: their number, divided by its duration.
        times: the second of each frame, for models whose prompts say it; None: frame i is at (begin + i) / fps.
        begin: number of frames of the same video that are before these in the prompt, if these are a part of a longer
            video (`Chat.watch`); None: they are the whole video.
    """

    frames: Sequence[Picture]
    fps: float = 2.0
    times: Sequence[float] | None = None
    begin: int | None = None

    def __post_init__(self) -> None:
        """Makes `frames` and `times` tuples and `fps` a float.

        Raises:
            InputError: values of other types, no frames, or times that are not one increasing number per frame.
        """
        frames, fps = self.frames, self.fps
        single = isinstance(frames, str | bytes | os.PathLike) or (isinstance(frames, np.ndarray) and frames.ndim < 4)
        if single or not isinstance(frames, Iterable):
            raise InputError(f"a video's frames must be a list of pictures, not {type(frames).__name__}; "
                             "vlkv.processing.read_video(path, frames=8) reads a video file")  # fmt: skip
        object.__setattr__(self, "frames", tuple(frames))
        object.__setattr__(self, "fps", checked_fps(fps))
        if not self.frames:
            raise InputError("a video needs at least one frame")
        if self.times is not None:
            times = np.asarray(self.times, np.float64)
            if times.shape != (len(self.frames),) or not (np.isfinite(times) & (np.diff(times, prepend=0) >= 0)).all():
                raise InputError(f"a video's times must be {len(self.frames)} increasing numbers of seconds, one per "
                                 "frame")  # fmt: skip
            object.__setattr__(self, "times", tuple(times.tolist()))

    @property
    def seconds(self) -> tuple[float, ...]:
        """The time of each frame."""
        if self.times is not None:
            return tuple(self.times)
        return tuple((i + (self.begin or 0)) / self.fps for i in range(len(self.frames)))


def checked_fps(fps: object) -> float:
    """Frames per second as a float; raises InputError unless they are a positive number."""
    if isinstance(fps, bool) or not isinstance(fps, numbers.Real) or not 0 < float(fps) < math.inf:
        raise InputError(f"a video's fps={fps!r} must be a positive number")
    return float(fps)


RowImages: TypeAlias = Picture | Video | Sequence[Picture | Video] | None  # of one question


@dataclasses.dataclass(frozen=True, kw_only=True)
class Read:
    """One image or video as arrays."""

    arrays: dict[str, np.ndarray]
    tokens: int  # number of its vision tokens
    # Text that replaces its mark in the prompt, with the image token `tokens` times. None: only the repeated token.
    text: str | None = None


class Pictures:
    """Converts images and videos to arrays. A family overrides `image`, and `video` if it supports videos."""

    # Kind ("image", "video") -> its mark in the prompt, if this is not the text of its token.
    spelled: ClassVar[Mapping[str, str]] = {}

    def read(self, picture: Picture | Video, *, images: int = 1) -> Read:
        """Converts one image or video of a prompt with `images` images; raises InputError if it cannot be used."""
        return self.video(picture) if isinstance(picture, Video) else self.image(open_image(picture), images)

    def image(self, image: PIL.Image.Image, images: int) -> Read:
        """Converts one RGB image of a prompt with `images` images."""
        raise NotImplementedError

    def video(self, video: Video) -> Read:
        """Converts one video."""
        raise InputError("the model does not support videos; give the frames as images")

    def batch(self, reads: Sequence[Read]) -> dict[str, Any]:
        """The arrays of a batch, with the names and shapes of the family's processor in transformers.

        Arrays of pixels are joined along their first axis, other arrays are stacked.
        """
        arrays_of = by_name(reads)
        join = {name: np.concatenate if name.startswith("pixel") else np.stack for name in arrays_of}
        return {name: join[name](parts) for name, parts in arrays_of.items()}


def by_name(reads: Sequence[Read]) -> dict[str, list[np.ndarray]]:
    """Array name -> the arrays of all reads that have it."""
    names = dict.fromkeys(name for read in reads for name in read.arrays)
    return {name: [read.arrays[name] for read in reads if name in read.arrays] for name in names}


def to_square(image: PIL.Image.Image, settings: PixelSettings, side: int) -> Float[np.ndarray, "3 side side"]:
    """Pixels for the tower; InputError if the settings give another size than side x side."""
    pixels = to_pixels(image, settings)
    if pixels.shape != (3, side, side):
        raise InputError(
            f"the image processor config makes {pixels.shape[1]} x {pixels.shape[2]} pixels, but the "
            f"tower in config.json takes {side} x {side}: the files belong to different checkpoints"
        )
    return pixels


def tiles_of(image: PIL.Image.Image, side: int) -> list[PIL.Image.Image]:
    """An image cut into squares, line by line."""
    corners = [(x, y) for y in range(0, image.height, side) for x in range(0, image.width, side)]
    return [image.crop((x, y, x + side, y + side)) for x, y in corners]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquarePictures(Pictures):
    """Converts every image to one square."""

    settings: PixelSettings
    side: int  # pixels per side for the tower
    tokens: int  # vision tokens of an image

    @override
    def image(self, image: PIL.Image.Image, images: int) -> Read:
        return Read(arrays={"pixel_values": to_square(image, self.settings, self.side)[None]}, tokens=self.tokens)


def count(pictures: Sequence[Picture | Video]) -> tuple[int, int]:
    """The numbers of images and of videos."""
    videos = sum(isinstance(picture, Video) for picture in pictures)
    return len(pictures) - videos, videos


def rows_of(images: object, text: object) -> tuple[list[list[Picture | Video]], list[str]]:
    """The pictures and the text of each row, from the arguments of `Processor.__call__`, if they match."""
    if not isinstance(text, list | tuple):
        return [as_list(images)], [text]  # type: ignore[list-item]
    texts = list(text)
    if not texts:
        raise InputError("the list of prompts is empty")
    if images is None:
        return [[] for _ in texts], texts
    if not isinstance(images, list | tuple) or len(images) != len(texts):
        received = f"a list of {len(images)}" if isinstance(images, list | tuple) else "a single image"
        raise InputError(
            f"{len(texts)} prompts need a list of {len(texts)} entries, each an image, a list of images or "
            f'None, not {received}; one question about several images: processor([a, b], "question")'
        )
    return [as_list(entry) for entry in images], texts


def as_list(entry: object) -> list[Picture | Video]:
    """The images of one question, in any form that `Processor` accepts, as a list."""
    if entry is None:
        return []
    return list(entry) if isinstance(entry, list | tuple) else [entry]  # type: ignore[list-item]


def read_video(path: str | os.PathLike[str], frames: int) -> Video:
    """Reads at most `frames` frames of a video, evenly spread from the first to the last.

    Args:
        path: a video file, or a folder of pictures: the frames in the order of the numbers in their names, at 2 frames
            per second.
        frames: limit on the number of frames.

    Raises:
        InputError: the folder is empty, or the order of its names is ambiguous; the file cannot be decoded, or PyAV is
            not installed.
    """
    path = Path(path)
    if path.is_dir():
        files = _pictures_of(path)
        chosen = _spread(len(files), frames)
        return Video(
            frames=[files[i] for i in chosen], fps=2.0 * len(chosen) / len(files), times=(chosen / 2.0).tolist()
        )
    av = _av(path)
    try:
        with av.open(str(path)) as container:
            rate = float(container.streams.video[0].average_rate or 2)
            count = sum(1 for _ in container.decode(video=0))
        if not count:
            raise InputError(f"{path}: a video without frames; copy or convert it again")
        chosen = _spread(count, frames)
        with av.open(str(path)) as container:  # a second pass, so that memory holds only the chosen frames
            pictures = [_upright(frame) for i, frame in enumerate(container.decode(video=0)) if i in chosen]
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise InputError(f"{path}: not a video, or a damaged one ({error})") from None
    return Video(frames=pictures, fps=rate * len(chosen) / count, times=(chosen / rate).tolist())


def stream_video(source: str | os.PathLike[str] | BinaryIO, fps: float) -> Iterator[Picture]:
    """Yields `fps` frames per second of a video, also if it never ends: at each time, the latest frame.

    Memory holds one frame. `Chat.watch` takes this iterator.

    Args:
        source: a file, a folder of pictures as in `read_video`, or an open stream of a format that needs no seeking,
            such as Matroska, MPEG-TS or YUV4MPEG2 (`ffmpeg ... -f matroska -`).
        fps: frames per second.

    Raises:
        InputError: as `read_video`.
    """
    fps, due, latest = checked_fps(fps), 0, None
    begin = last = 0.0
    for time, picture in _timed(source):
        begin = time if latest is None else begin
        while latest is not None and due / fps < time - begin:
            yield latest
            due += 1
        latest, last = picture, time - begin
    while latest is not None and due / fps <= last:
        yield latest
        due += 1


def _timed(source: str | os.PathLike[str] | BinaryIO) -> Iterator[tuple[float, Picture]]:
    """All frames with their seconds, one by one."""
    if isinstance(source, str | os.PathLike) and Path(source).is_dir():
        yield from ((i / 2.0, file) for i, file in enumerate(_pictures_of(Path(source))))
        return
    name = str(source) if isinstance(source, str | os.PathLike) else "the stream"
    av = _av(name)
    try:
        with av.open(name if name == str(source) else source) as container:
            rate = float(container.streams.video[0].average_rate or 2)
            for i, frame in enumerate(container.decode(video=0)):
                yield i / rate if frame.time is None else frame.time, _upright(frame)
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise InputError(f"{name}: not a video, or a damaged one ({error})") from None


def _av(name: object) -> Any:
    """The package that decodes videos, which is optional."""
    try:
        import av  # noqa: PLC0415
    except ImportError:
        raise InputError(f"{name}: video files need PyAV: pip install av, or give a folder of frames") from None
    return av


def _pictures_of(folder: Path) -> list[Path]:
    """The frames of a video in a folder, in order."""
    files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise InputError(f"{folder}: an empty folder; put the video's frames into it as pictures")
    return _ordered(files)


def _ordered(files: list[Path]) -> list[Path]:
    """Files in the order of the numbers in their names: frame2.png is before frame10.png.

    Raises:
        InputError: the names may also mean another order, because points may be decimal, or because all have the same
            length, as if letters were digits too; or two names differ only in zeros before a number.
    """

    def key(file: Path, number: str) -> list[Any]:
        parts = re.split(f"({number})", file.stem)
        return [float(part) if i % 2 else part for i, part in enumerate(parts)] + [file.suffix]

    by_number = sorted(files, key=lambda file: key(file, r"\d+"))
    keys = [key(file, r"\d+") for file in by_number]
    twin = next((i for i in range(1, len(keys)) if keys[i] == keys[i - 1]), None)
    if twin is not None:
        raise InputError(f"{files[0].parent}: {by_number[twin - 1].name} and {by_number[twin].name} have the same "
                         "number: keep one of them")  # fmt: skip
    others = [sorted(files, key=lambda file: key(file, r"\d+(?:\.\d+)?"))]
    if len({len(file.name) for file in files}) == 1:
        others.append(sorted(files))
    for other in others:
        first, second = next(((a, b) for a, b in zip(by_number, other, strict=True) if a != b), (None, None))
        if first is not None and second is not None:
            raise InputError(f"{files[0].parent}: is {first.name} before {second.name}? Name the frames by whole "
                             "numbers of equal length, such as 0001.png")  # fmt: skip
    return by_number


def _upright(frame: Any) -> PIL.Image.Image:
    """The picture of a frame, rotated as players show it. Phones store upright videos rotated by 90 degrees."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _spread(count: int, frames: int) -> np.ndarray:
    """Indices of at most `frames` of `count` frames."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, frames))).astype(int))
