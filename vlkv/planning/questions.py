"""Prompts of a given length, as shapes: as many pictures as fit, the rest text, laid out by the family's own code.

One row is laid out for real, with zeros for pixels; a batch has as many times its pictures, rounded up to the bucket
that a batch of the processor would be rounded up to. So nothing of the batch's size is ever made.

Axes: B batch · T tokens · I pictures, tiles or frames of the batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.inputs import Inputs

TEXT = 64  # tokens of a prompt, at least, that are not pictures: the marks, the system's words and a question

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One row of the batch.

    Attributes:
        pictures: pictures, or tiles, of a prompt.
        vision: their tokens.
        text: the others.
        inputs: the whole batch, ShapeDtypeStructs for arrays.
    """

    pictures: int
    vision: int
    text: int
    inputs: Inputs


def question(
    config: ModelConfig, *, batch: int, prompt: int, pictures: int | None = None, buckets: Buckets | None = None
) -> Question:
    """A batch of prompts of `prompt` tokens each.

    Args:
        config: the model's.
        batch: B.
        prompt: tokens of each prompt, pictures included.
        pictures: of each prompt; None: as many as leave room for 64 other tokens.
        buckets: as the processor's.

    Raises:
        InputError: a prompt in which not one picture has room, or more pictures than it has room for.
    """
    buckets = buckets or Buckets()
    count, arrays, vision = _filled(config, prompt, pictures)
    tokens = np.ones((1, prompt), np.int64)
    before = min(8, prompt - vision)  # what stands before a picture; what comes after is the instruction
    tokens[0, before : before + vision] = 1 if config.image_token is None else config.image_token
    one = Inputs.from_hf({"input_ids": tokens, **arrays}, config, buckets)
    exact = Inputs.from_hf({"input_ids": tokens, **arrays}, config, _unrounded(buckets))

    # How many entries every array of one row really needs.
    needed = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_flatten_with_path(exact)[0]}

    def whole(path: tuple[Any, ...], x: np.ndarray) -> jax.ShapeDtypeStruct:
        kinds = config.whole_batch.get(getattr(path[-1], "name", getattr(path[-1], "key", "")))
        if kinds is None:
            return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
        counts = zip(needed[jax.tree_util.keystr(path)], kinds, strict=False)
        leading = [round_up(batch * count, getattr(buckets, kind)) for count, kind in counts]
        return jax.ShapeDtypeStruct((*leading, *x.shape[len(leading) :]), x.dtype)

    inputs = jax.tree_util.tree_map_with_path(whole, one)
    return Question(pictures=count, vision=vision, text=prompt - vision, inputs=inputs)


def _unrounded(buckets: Buckets) -> Buckets:
    """Every number of pictures, and of mixed embeddings, is a bound of its own; sizes of a picture keep theirs."""
    return dataclasses.replace(buckets, images=(0, 1), vision=(0, 1))


def _filled(config: ModelConfig, prompt: int, pictures: int | None) -> tuple[int, Batch, int]:
    """How many pictures, what the processor would hand over for them, and their tokens."""
    room = prompt - TEXT
    count = config.most_pictures(room) if pictures is None else pictures
    if not count:
        return 0, {}, 0
    if config.vision is None:
        raise InputError(f"--images {pictures}: the model has no vision tower; leave it out")
    arrays, vision = config.sample(count, room)
    if vision + TEXT > prompt:
        what = "a picture has" if count == 1 else f"{count} pictures have"
        raise InputError(f"--prompt {prompt}: {what} {vision} tokens, and {TEXT} are for the text around; give at "
                         f"least --prompt {vision + TEXT}, or fewer --images (0: text alone)")  # fmt: skip
    return count, arrays, vision
