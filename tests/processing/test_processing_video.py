"""The frames of a video, in every form that users give."""

import dataclasses
from fractions import Fraction

import numpy as np
import PIL.Image
import pytest

from vlkv.errors import InputError
from vlkv.processing import Video, pictures, read_video

FRAMES = [PIL.Image.new("RGB", (4, 3), (i, i, i)) for i in range(3)]


def test_frames():
    arrays = np.stack([np.array(frame) for frame in FRAMES])
    for frames in (FRAMES, tuple(FRAMES), (frame for frame in FRAMES), iter(FRAMES), arrays):
        video = Video(frames, 2)
        for _ in range(2):  # an iterator is read once and kept
            assert [np.array(frame).max() for frame in video.frames] == [0, 1, 2]
        assert dataclasses.replace(video, fps=1.0).fps == 1


def test_rates():
    for fps in (2, 2.0, np.float32(2), np.int64(2), Fraction(2)):
        assert Video(FRAMES, fps).fps == 2.0 and isinstance(Video(FRAMES, fps).fps, float)
    for fps in ("2", 0, -1.0, float("nan"), float("inf"), None, True, [2]):
        with pytest.raises(InputError, match="must be a positive number"):
            Video(FRAMES, fps)


def test_frames_that_are_refused():
    for frames in ("clip.mp4", b"clip", FRAMES[0], np.array(FRAMES[0]), 3, None):
        with pytest.raises(InputError, match=r"a list of pictures, not \w+; vlkv.processing.read_video"):
            Video(frames, 2)
    for none in ([], iter(()), np.zeros((0, 4, 4, 3), np.uint8)):
        with pytest.raises(InputError, match="at least one frame"):
            Video(none)


class Frame:
    """A frame of PyAV, which does not turn the picture itself."""

    def __init__(self, rotation):
        self.rotation = rotation

    def to_image(self):
        image = PIL.Image.new("RGB", (4, 3))
        image.putpixel((0, 0), (255, 0, 0))
        return image


@pytest.mark.parametrize(
    ("rotation", "size", "corner"), [(0, (4, 3), (0, 0)), (-90, (3, 4), (2, 0)), (90, (3, 4), (0, 3))]
)
def test_frames_of_a_phone_are_upright(rotation, size, corner):
    """A rotation by 90 degrees is counterclockwise, as in FFmpeg: the first corner comes to the lower left."""
    image = pictures._upright(Frame(rotation))
    assert image.size == size and image.getpixel(corner) == (255, 0, 0)


def test_times_of_chosen_frames(tmp_path):
    """From the first to the last: not their number by the duration, which is the rate for models that need one."""
    for i in range(10):
        FRAMES[0].save(tmp_path / f"{i}.png")
    video = read_video(tmp_path, frames=2)
    assert video.seconds == (0.0, 4.5) and video.fps == 2.0 * 2 / 10
    assert Video(FRAMES, 2).seconds == (0.0, 0.5, 1.0)
    assert dataclasses.replace(video, times=None).seconds == (0.0, 2.5)


@pytest.mark.parametrize("times", [[0.0], [0.0, 2.0, 1.0], [-1.0, 0.0, 1.0], [0.0, 1.0, float("nan")]])
def test_times_that_are_refused(times):
    with pytest.raises(InputError, match="times must be 3 increasing numbers"):
        Video(FRAMES, 2, times)
