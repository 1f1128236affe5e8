"""Reads videos: a folder of frames, or a file that PyAV decodes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from vlkv.errors import InputError
from vlkv.processing.pictures import Video


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
        found = [file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
        if not found:
            raise InputError(f"{path}: an empty folder; put the video's frames into it as pictures")
        found = _ordered(found)
        chosen = _spread(len(found), frames)
        return Video(
            frames=[found[i] for i in chosen], fps=2.0 * len(chosen) / len(found), times=(chosen / 2.0).tolist()
        )
    try:
        import av  # noqa: PLC0415 (optional)
    except ImportError:
        raise InputError(f"{path}: video files need PyAV: pip install av, or give a folder of frames") from None
    try:
        with av.open(str(path)) as container:
            rate = float(container.streams.video[0].average_rate or 2)
            count = sum(1 for _ in container.decode(video=0))
        if not count:
            raise InputError(f"{path}: a video without frames; copy or convert it again")
        wanted = _spread(count, frames)
        with av.open(str(path)) as container:  # a second pass, so that memory holds only the chosen frames
            taken = [_upright(frame) for i, frame in enumerate(container.decode(video=0)) if i in wanted]
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise InputError(f"{path}: not a video, or a damaged one ({error})") from None
    return Video(frames=taken, fps=rate * len(wanted) / count, times=(wanted / rate).tolist())


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
        one, two = next(((a, b) for a, b in zip(by_number, other, strict=True) if a != b), (None, None))
        if one is not None and two is not None:
            raise InputError(f"{files[0].parent}: is {one.name} before {two.name}? Name the frames by whole numbers "
                             "of equal length, such as 0001.png")  # fmt: skip
    return by_number


def _upright(frame: Any) -> PIL.Image.Image:
    """The picture of a frame, turned as players show it: phones store upright videos lying on their side."""
    image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _spread(count: int, frames: int) -> np.ndarray:
    """Indices of at most `frames` of `count` frames."""
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, frames))).astype(int))
