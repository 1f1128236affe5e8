"""Prompts of a given length, as shapes: as many pictures as fit, the rest text, laid out by the family's own code.

One row is laid out for real, with zeros for pixels; a batch has as many times its pictures, rounded up to the bucket
that a batch of the processor would be rounded up to. So nothing of the batch's size is ever made.

Axes: B batch · T tokens · I pictures, tiles or frames of the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig, QwenVisionConfig
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.layouts import llava_next

TEXT = 64  # tokens of a prompt, at least, that are not pictures: the marks, the system's words and a question
_PICTURE = (480, 640)  # height and width in pixels, for families whose tokens depend on them
_QWEN_TOKENS = 1280  # of one picture at most: the default bound of transformers' processor
# Arrays of the whole batch: which buckets their first axis is rounded up to.
_LEADING = {"pixels": "images", "place": "images", "taps": "vision", "weights": "vision"}

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One row of the batch.

    Attributes:
        pictures: pictures (InternVL: tiles) of a prompt.
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
    needed = {jax.tree_util.keystr(path): len(x) for path, x in jax.tree_util.tree_flatten_with_path(exact)[0]}

    def whole(path: tuple[Any, ...], x: np.ndarray) -> jax.ShapeDtypeStruct:
        bounds = _LEADING.get(getattr(path[-1], "name", getattr(path[-1], "key", "")))
        count = batch if bounds is None else batch * needed[jax.tree_util.keystr(path)]
        return jax.ShapeDtypeStruct((count if bounds is None else round_up(count, getattr(buckets, bounds)),
                                     *x.shape[1:]), x.dtype)  # fmt: skip

    inputs = jax.tree_util.tree_map_with_path(whole, one)
    return Question(pictures=count, vision=vision, text=prompt - vision, inputs=inputs)


def _unrounded(buckets: Buckets) -> Buckets:
    """Every number of pictures, and of mixed embeddings, is a bound of its own; sizes of a picture keep theirs."""
    return dataclasses.replace(buckets, images=(0, 1), vision=(0, 1))


def _filled(config: ModelConfig, prompt: int, pictures: int | None) -> tuple[int, Batch, int]:
    """How many pictures, what the processor would hand over for them, and their tokens."""
    fill = _FILLS.get(config.family)
    if fill is None:
        if config.vision is not None:
            raise InputError(f"{config.family}: no plan for this family; there are {', '.join(_FILLS)}")
        if pictures:
            raise InputError(f"--images {pictures}: the model has no vision tower; leave it out")
        return 0, {}, 0
    if pictures == 0:
        return 0, {}, 0
    if pictures is not None:
        arrays, vision = fill(config, pictures, prompt - TEXT)
        _require(prompt, vision, pictures)
        return pictures, arrays, vision
    room = prompt - TEXT
    best = 1
    while fill(config, best + 1, room)[1] <= room and best < 4096:
        best += 1
    if config.family in _SHARED:  # the fewest pictures that fill the room
        best = max(1, math.ceil(room / _QWEN_TOKENS))
    arrays, vision = fill(config, best, room)
    _require(prompt, vision, best)
    return best, arrays, vision


def _require(prompt: int, vision: int, pictures: int) -> None:
    if vision + TEXT > prompt:
        what = "a picture has" if pictures == 1 else f"{pictures} pictures have"
        raise InputError(f"--prompt {prompt}: {what} {vision} tokens, and {TEXT} are for the text around; give at "
                         f"least --prompt {vision + TEXT}, or fewer --images (0: text alone)")  # fmt: skip


def _squares(config: ModelConfig, pictures: int, room: int) -> tuple[Batch, int]:
    """Pictures of one size and one number of tokens."""
    del room
    side = config.vision.image_size  # type: ignore[union-attr]
    per_picture = getattr(config.wiring, "tokens", config.vision.tokens)  # type: ignore[union-attr]
    return {"pixel_values": _zeros(pictures, 3, side, side)}, pictures * per_picture


def _cut(config: ModelConfig, pictures: int, room: int) -> tuple[Batch, int]:
    """Pictures of 640 x 480 that are cut into tiles; several in one prompt may be shown whole only."""
    del room
    laid = llava_next.Pictures(config)
    per_picture = len(laid.picture(_PICTURE, alone=pictures == 1))
    tiles, side = laid.tiles, config.vision.image_size  # type: ignore[union-attr]
    pixels = [_zeros(tiles, 3, side, side)] * pictures
    batch = {"pixel_values": pixels, "image_sizes": [_PICTURE] * pictures, "batch_num_images": [pictures]}
    return batch, pictures * per_picture


def _native(config: ModelConfig, pictures: int, room: int) -> tuple[Batch, int]:
    """Square pictures at their own size that share the room, each of at most 1280 tokens."""
    c = config.vision
    assert isinstance(c, QwenVisionConfig)
    side = math.isqrt(max(1, min(room // pictures, _QWEN_TOKENS)))
    patches = (side * c.merge) ** 2
    grid = np.array([[1, side * c.merge, side * c.merge]] * pictures)
    return {"pixel_values": _zeros(pictures * patches, c.patch_values), "image_grid_thw": grid}, pictures * side**2


def _zeros(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)


_FILLS: dict[str, Callable[[ModelConfig, int, int], tuple[Batch, int]]] = {
    **dict.fromkeys(("llava", "llava_llama", "internvl", "internvl_chat"), _squares),
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision", "llava_qwen"), _cut),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _native),
}
_SHARED = ("qwen2_vl", "qwen2_5_vl")
