"""Samples that commands measure: questions with their images or videos, from a JSONL or a folder of images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing import Processor
from vlkv.processing.images import FORMATS
from vlkv.tools.evaluation.dialogue import first_inputs
from vlkv.tools.evaluation.records import Record, Turn, read_records

_FRAMES = 8  # sampled from a video


def sample(images: Sequence[Any], question: str) -> Record:
    """A question about images, which are files or Pillow images."""
    return Record(line=0, id="", images=tuple(images), turns=(Turn(question, ()),))


def read_samples(data: Path, prompt: str | None = None, number: int | None = None, seed: int = 0) -> list[Record]:
    """The rows of a JSONL, of which only the first question is measured; or one question about each image of a folder.

    `number` of them are drawn at random, without replacement; None: all.
    """
    if data.is_dir():
        samples = _images_of(data, prompt)
    elif prompt is not None:
        raise InputError(f"--prompt is for a folder of images: the rows of {data} have their own questions")
    else:
        samples = read_records(data, answers=False)
    if number is None:
        return samples
    if number > len(samples):
        raise InputError(f"--samples {number}: {data} has only {len(samples)}")
    order = np.random.default_rng(seed).permutation(len(samples))
    return [samples[i] for i in order[:number]]


def _images_of(folder: Path, prompt: str | None) -> list[Record]:
    if prompt is None:
        raise InputError(f"{folder}: a folder of images needs --prompt")
    endings = {ending for ending, form in Image.registered_extensions().items() if form in FORMATS}
    images = sorted(path for path in folder.iterdir() if path.suffix.lower() in endings)
    if not images:
        raise InputError(f"{folder}: no images in this folder")
    return [sample([image], prompt) for image in images]


def inputs_of(processor: Processor, record: Record) -> Inputs:
    """The inputs of one sample: what `vlkv eval` prefills for its first question."""
    return first_inputs(processor, [[record]], query_agnostic=False, frames=_FRAMES)[0]
