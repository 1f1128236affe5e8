"""Shapes of `Inputs` for prompts of a given length, filled with as many images as fit, the rest text.

The family's own code makes the inputs of one row, with zeros for pixels. The shapes of the batch follow from it: B
times the images, rounded up to buckets. So no array of the size of the batch is made.

Axes: B batch · T tokens · I images, tiles or frames of the batch.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.inputs import Inputs

TEXT = 64  # least number of text tokens in a prompt with images: marks, system message and question

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A batch of equal prompts, and the images and tokens of each."""

    pictures: int
    vision: int
    text: int
    inputs: Inputs  # the whole batch, with ShapeDtypeStructs in place of arrays


def question(
    config: ModelConfig, *, batch: int, prompt: int, pictures: int | None = None, buckets: Buckets | None = None
) -> Question:
    """A batch of prompts of `prompt` tokens each, including vision tokens.

    `pictures` are the images of each prompt, by default as many as fit beside 64 text tokens, and `buckets` those of
    the processor.

    Raises:
        InputError: the images do not fit into the prompt.
    """
    buckets = buckets or Buckets()
    count, arrays, vision = _filled(config, prompt, pictures)
    seen = np.full(vision, 1 if config.image_token is None else config.image_token, np.int64)
    if config.decoder.image_block and count:
        each = vision // count
        seen = np.insert(seen, range(each, vision, each), 1)
    tokens = np.ones((1, prompt), np.int64)
    before = min(8, prompt - len(seen))  # text before the images; the text after them is the instruction
    tokens[0, before : before + len(seen)] = seen
    row = Inputs.from_hf({"input_ids": tokens, **arrays}, config, buckets)
    unrounded = dataclasses.replace(buckets, images=(0, 1), vision=(0, 1))
    exact = Inputs.from_hf({"input_ids": tokens, **arrays}, config, unrounded)

    # Sizes of the arrays of one row before rounding.
    needed = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_flatten_with_path(exact)[0]}

    def of_batch(path: tuple[Any, ...], x: np.ndarray) -> jax.ShapeDtypeStruct:
        kinds = config.whole_batch.get(getattr(path[-1], "name", getattr(path[-1], "key", "")))
        if kinds is None:
            return jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
        counts = zip(needed[jax.tree_util.keystr(path)], kinds, strict=False)
        leading = [round_up(batch * count, getattr(buckets, kind)) for count, kind in counts]
        return jax.ShapeDtypeStruct((*leading, *x.shape[len(leading) :]), x.dtype)

    inputs = jax.tree_util.tree_map_with_path(of_batch, row)
    return Question(pictures=count, vision=vision, text=prompt - vision, inputs=inputs)


def _filled(config: ModelConfig, prompt: int, pictures: int | None) -> tuple[int, Batch, int]:
    """Number of images, the processor's arrays for them, and their number of vision tokens."""
    max_tokens, block = prompt - TEXT, config.decoder.image_block
    count = config.max_pictures(max_tokens) if pictures is None else pictures
    if block and pictures is None:
        count = min(count, max(1, max_tokens // (block + 1)))
    if not count:
        return 0, {}, 0
    if config.vision is None:
        raise InputError(f"--images {pictures}: the model has no vision tower; leave it out")
    arrays, vision = config.sample(count, max_tokens)
    text = TEXT + (count - 1 if block else 0)  # with a token between two images whose tokens attend to each other
    if vision + text > prompt:
        what = "an image has" if count == 1 else f"{count} images have"
        remedy = f"give at least --prompt {vision + text}, or fewer --images (0: only text)"
        raise InputError(f"--prompt {prompt}: {what} {vision} tokens, and {text} are for text; {remedy}")
    return count, arrays, vision
