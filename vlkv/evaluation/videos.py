"""Videos of an evaluation: a folder of frames, or a file that PyAV decodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vlkv.errors import InputError
from vlkv.processing import Video


def read_video(path: Path, frames: int) -> Video:
    """At most so many frames of a video, evenly spread from its first to its last one.

    Args:
        path: a folder of pictures, which are frames in the order of their names at 2 frames per second; or a file.
        frames: how many the model sees at most.

    Raises:
        InputError: no frames, a file that cannot be decoded, or PyAV is missing.
    """
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not found:
            raise InputError(f"{path}: an empty folder; put the video's frames there as pictures")
        chosen = _spread(len(found), frames)
        return Video(frames=[found[i] for i in chosen], fps=2.0 * len(chosen) / len(found))
    try:
        import av  # noqa: PLC0415 (optional)
    except ImportError:
        raise InputError(f"{path}: video files need PyAV: pip install av, or give a folder of frames") from None
    try:
        with av.open(str(path)) as container:
            rate = float(container.streams.video[0].average_rate or 2)
            count = sum(1 for _ in container.decode(video=0))
        wanted = set(_spread(count, frames).tolist())
        with av.open(str(path)) as container:  # again, so that only the chosen frames are held
            chosen_frames = [f.to_image() for i, f in enumerate(container.decode(video=0)) if i in wanted]
    except (av.error.FFmpegError, IndexError, ValueError) as error:
        raise InputError(f"{path}: not a video, or a damaged one ({error})") from None
    return Video(frames=chosen_frames, fps=rate * len(wanted) / count)


def _spread(count: int, frames: int) -> np.ndarray:
    return np.unique(np.rint(np.linspace(0, count - 1, min(count, frames))).astype(int))
