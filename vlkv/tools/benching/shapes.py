"""Random prompts of any length for any model, without a processor, because timing depends only on shapes.

Vision tokens come first, on square grids, and text last, as in the papers' measurements. The vision tower does not run:
vision tokens are embedded like text, which does not change shapes. The tower has the same cost with every policy,
except for the attention that FasterVLM, HiRED and IVTP use; here it is zero.

Axes: B batch · T prompt · V vision tokens · A position axes.
"""

from __future__ import annotations

import math

import numpy as np

from vlkv.config import ModelConfig
from vlkv.inputs import Inputs

IMAGE = 576  # vision tokens of one image, 24 x 24; the rest of a prompt is a smaller image


def images_of(vision: int) -> int:
    """Number of images for `vision` tokens."""
    return -(-vision // IMAGE)


def make_inputs(config: ModelConfig, batch: int, prompt: int, vision: int, *, seed: int = 0) -> Inputs:
    """Rows of `prompt` tokens: `vision` vision tokens, then text. `seed` is for the token ids."""
    place = np.arange(prompt)
    is_vision = place < vision
    tokens = np.random.default_rng(seed).integers(0, config.decoder.vocab_size, (batch, prompt), np.int32)
    index = np.where(is_vision, np.arange(batch)[:, None] * vision + place, -1).astype(np.int32)
    return Inputs(
        tokens=tokens,
        positions=np.broadcast_to(place[None, :, None], (batch, prompt, config.decoder.rope.position_axes)).astype(
            np.int32
        ),
        valid=np.ones((batch, prompt), bool),
        vision_index=index,
        grid=np.broadcast_to(_grid(prompt, vision), (batch, prompt, 3)).copy(),
        pixels=None,
        max_vision=vision,
        max_text=prompt - vision,
        max_instruction=prompt - vision,
        max_images=images_of(vision),
    )


def _grid(prompt: int, vision: int) -> np.ndarray:
    """[T, 3]: image, line and column of every vision token; -1 for text."""
    grid = np.full((prompt, 3), -1, np.int32)
    image, place = np.divmod(np.arange(vision), IMAGE)
    last = vision % IMAGE  # tokens of the smaller image
    side = np.where((image == vision // IMAGE) & (last > 0), max(1, math.isqrt(last)), math.isqrt(IMAGE))
    grid[:vision] = np.stack([image, place // side, place % side], axis=1)
    return grid
