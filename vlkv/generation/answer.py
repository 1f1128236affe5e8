"""`answer`: from pictures and a question to a text, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PRNGKeyArray

from vlkv.compression.policy import Policy
from vlkv.families import Model
from vlkv.generation.generate import generate
from vlkv.generation.sampling import Greedy
from vlkv.processing import Processor


def answer(
    params: Model,
    processor: Processor,
    image: Any,
    question: str | Sequence[str],
    *,
    policy: Policy | None = None,
    sampling: Greedy | None = None,
    key: PRNGKeyArray | None = None,
) -> str | list[str]:
    """The text of the answer to a question about pictures; a list of answers if questions are a list.

    `vlkv.generate` needs `Inputs`, because under jit a program cannot read pictures; this function makes them.

    Args:
        params: the model.
        processor: of the same checkpoint.
        image: as the processor accepts it: a path, a PIL image, an array, several of them, or None.
        question: text; a list of them makes one batch.
        policy: None: the full cache.
        sampling: None: `Greedy()`.
        key: as in `generate`.

    Raises:
        InputError: an image or a text cannot be used, and as in `generate`.
    """
    output = generate(params, processor(image, question), policy=policy, sampling=sampling, key=key)
    texts = processor.decode(np.asarray(output.tokens), np.asarray(output.lengths))
    return texts[0] if isinstance(question, str) else texts
