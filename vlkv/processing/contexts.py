"""Prompts that begin with a context, which can be compressed before the question is known.

Axes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from vlkv.errors import InputError
from vlkv.processing.prompts import PromptWriter

_PROBE = "vlkvprobe"


def joined(context: str, question: str) -> str:
    """The text of a message with a context and a question; a line break separates them if no white space does."""
    return separated(context, "\n", question) + question


def separated(text: str, separator: str, following: str) -> str:
    """The text, and the separator if there is no white space between the text and what follows it."""
    return text if not text or text[-1].isspace() or following[:1].isspace() else text + separator


def context_part(prompts: PromptWriter, context: str, question: str, images: int, videos: int = 0) -> str:
    """The prompt up to where the question begins. It is the same for all questions that begin alike with white space.

    Args:
        prompts: writes the prompts of the model.
        context: text, with or without marks for the images; "": the context consists of images.
        question: text without marks.
        images: number of images.
        videos: number of videos.

    Raises:
        InputError: as `PromptWriter.write`; also if the context is not the beginning of the prompt.
    """
    if not context:
        return prompts.before_question(question, images, videos)
    before, found, _ = prompts.write(separated(context, "\n", question) + _PROBE, images, videos).rpartition(_PROBE)
    if not found or not prompts.write(joined(context, question), images, videos).startswith(before):
        raise InputError("the prompt does not begin with the context: mark images only in the context, or use a chat "
                         "template that does not depend on the question")  # fmt: skip
    return before


def shared(first: Int[np.ndarray, " T"], others: Sequence[Int[np.ndarray, " _t"]]) -> int:
    """The number of ids at the beginning of `first` with which all `others` begin too."""
    count = len(first)
    for ids in others:
        count = min(count, len(ids))
        count = int(next(iter(np.flatnonzero(first[:count] != ids[:count])), count))
    return count
