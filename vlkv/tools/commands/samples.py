"""Samples that commands measure: questions with their images or videos, from a JSONL or a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing import Processor, read_video
from vlkv.tools.evaluation.records import read_records

_FRAMES = 8  # sampled from a video


class Sample(NamedTuple):
    """A question and its images or videos."""

    images: Sequence[Any]
    question: str
    videos: Sequence[Path] = ()


def read_samples(data: Path, prompt: str | None) -> list[Sample]:
    """The first question of each row of a JSONL, or one question about each image of a folder."""
    if not data.is_dir():
        records = read_records(data, answers=False)
        return [Sample(record.images, record.turns[0].question, record.videos) for record in records]
    if prompt is None:
        raise InputError(f"{data}: a folder of images needs --prompt")
    known = Image.registered_extensions()
    images = sorted(path for path in data.iterdir() if path.suffix.lower() in known)
    if not images:
        raise InputError(f"{data}: no images in this folder")
    return [Sample([image], prompt) for image in images]


def inputs_of(processor: Processor, sample: Sample) -> Inputs:
    """The inputs of one sample."""
    media = [*sample.images, *(read_video(video, _FRAMES) for video in sample.videos)]
    return processor(media or None, sample.question)
