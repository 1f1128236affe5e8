"""Inputs: what the processor hands to the model, a pytree whose static bounds decide what jit traces.

Axes: B batch · T padded prompt length · A position axes (1) · I images of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.config import ModelConfig
from vlkv.errors import InputError

# numpy as the processor makes them, jax once inside jit.
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """Bounds that lengths and counts are rounded up to, so that jit sees few shapes.

    Past the last bound, further steps like the last one.
    """

    text: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    images: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def round_up(n: int, bounds: tuple[int, ...]) -> int:
    """The smallest bound >= n, or as many steps past the last one as it takes."""
    step = bounds[-1] - bounds[-2] if len(bounds) > 1 else bounds[-1]
    return next((b for b in bounds if b >= n), bounds[-1] + -(-(n - bounds[-1]) // step) * step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """A padded batch of prompts. Rows may be padded on either side.

    The four bounds are static: two batches with equal bounds and shapes share one trace.
    """

    tokens: Int[AnyArray, "B T"]
    positions: Int[AnyArray, "B T A"]  # what RoPE sees
    valid: Bool[AnyArray, "B T"]
    vision_index: Int[AnyArray, "B T"]  # row of the batch's flat vision embeddings; -1: text
    grid: Int[AnyArray, "B T 3"]  # number of its image in the row, line and column of its patch; -1: on no grid
    pixels: Float[AnyArray, "I 3 h w"] | None
    max_vision: int = dataclasses.field(metadata={"static": True})  # vision tokens of any row
    max_text: int = dataclasses.field(metadata={"static": True})  # text tokens of any row
    max_instruction: int = dataclasses.field(metadata={"static": True})  # text after the last vision token
    max_images: int = dataclasses.field(metadata={"static": True})  # images of any row

    @property
    def is_vision(self) -> Bool[AnyArray, "B T"]:
        """Which entries are vision tokens; from here on nothing else says what an image is."""
        return self.vision_index >= 0

    @classmethod
    def from_hf(cls, batch: Mapping[str, Any], config: ModelConfig, buckets: Buckets | None = None) -> Inputs:
        """From what a transformers processor returns: input_ids, attention_mask, pixel_values.

        Args:
            batch: arrays, lists or CPU tensors; the image token must already be repeated once per vision token.
            config: the model's config (`params.config`).
            buckets: how to round lengths and counts; None for the defaults.

        Raises:
            InputError: image tokens and pixels that do not match, or a prompt beyond the model's limit.
        """
        buckets = buckets or Buckets()
        if "input_ids" not in batch:
            raise InputError(f"inputs have no input_ids (found: {', '.join(sorted(batch)) or 'nothing'})")
        try:
            tokens = np.atleast_2d(np.asarray(batch["input_ids"])).astype(np.int32)
        except ValueError:  # numpy's refusal of a ragged list
            raise InputError("input_ids: rows differ in length; call the processor: padding=True") from None
        mask = batch.get("attention_mask")
        valid = np.ones(tokens.shape, bool) if mask is None else np.atleast_2d(np.asarray(mask)).astype(bool)
        if valid.shape != tokens.shape:
            raise InputError(f"attention_mask has shape {valid.shape}, input_ids {tokens.shape}")
        if not valid.any(axis=1).all():
            raise InputError("a prompt of the batch is empty: every row needs at least one token")
        pixels = batch.get("pixel_values")
        pixels = None if pixels is None else np.asarray(pixels, np.float32)
        return cls._build(tokens, valid, pixels, config, buckets)

    @classmethod
    def _build(
        cls,
        tokens: np.ndarray,
        valid: np.ndarray,
        pixels: np.ndarray | None,
        config: ModelConfig,
        buckets: Buckets,
    ) -> Inputs:
        is_vision = valid & (tokens == config.image_token) if config.vision else np.zeros_like(valid)
        per_image = config.vision.tokens if config.vision else 1
        images = 0 if pixels is None else len(pixels)
        if is_vision.sum() != images * per_image or (is_vision.sum(axis=1) % per_image).any():
            raise InputError(
                f"the prompt holds {is_vision.sum()} image tokens, but {images} image(s) of {per_image} tokens "
                f"need {images * per_image}: give one <image> mark per image"
            )
        if config.vision and pixels is not None:
            want = (3, config.vision.image_size, config.vision.image_size)
            if pixels.shape[1:] != want:
                raise InputError(
                    f"pixel_values have shape {pixels.shape}, expected [images, {want[0]}, {want[1]}, {want[2]}]"
                )
        longest = int(valid.sum(axis=1).max())
        if longest > config.decoder.max_positions:
            raise InputError(f"the prompt has {longest} tokens, the model's limit is {config.decoder.max_positions}")
        if tokens[valid].min() < 0 or tokens[valid].max() >= config.decoder.vocab_size:
            raise InputError(f"a token id lies outside the vocabulary of {config.decoder.vocab_size}")

        place = np.arange(tokens.shape[1])
        last_vision = np.where(is_vision, place, -1).max(axis=1)  # -1: a row without an image is all instruction
        instruction = (valid & (place > last_vision[:, None])).sum(axis=1)
        row_images = round_up(int(-(-is_vision.sum(axis=1).max() // per_image)), buckets.images)
        max_vision = row_images * per_image
        max_text = round_up(int((valid & ~is_vision).sum(axis=1).max()), buckets.text)
        flat = np.where(is_vision, np.cumsum(is_vision.ravel()).reshape(is_vision.shape) - 1, -1)
        pad = [(0, 0), (0, max(0, max_vision + max_text - tokens.shape[1]))]
        if pixels is not None:
            pixels = np.pad(pixels, [(0, round_up(images, buckets.images) - images), (0, 0), (0, 0), (0, 0)])
        return cls(
            tokens=np.pad(np.where(valid, tokens, 0), pad),
            positions=np.pad(np.maximum(np.cumsum(valid, axis=1) - 1, 0), pad)[..., None].astype(np.int32),
            valid=np.pad(valid, pad),
            vision_index=np.pad(flat, pad, constant_values=-1).astype(np.int32),
            grid=np.pad(_grid(is_vision, config), [*pad, (0, 0)], constant_values=-1),
            pixels=pixels if images else None,
            max_vision=max_vision,
            max_text=max_text,
            max_instruction=min(max_text, round_up(int(instruction.max()), buckets.text)),
            max_images=row_images,
        )


def _grid(is_vision: Bool[np.ndarray, "B T"], config: ModelConfig) -> Int[np.ndarray, "B T 3"]:
    """Where every patch lies. A class token lies on no grid: -1 for line and column."""
    if config.vision is None:
        return np.full((*is_vision.shape, 3), -1, np.int32)
    number = np.cumsum(is_vision, axis=1) - 1
    image, place = np.divmod(number, config.vision.tokens)
    place = place - int(config.vision.keep_class_token)
    line, column = np.divmod(place, config.vision.grid)
    patch = is_vision & (place >= 0)
    return np.stack(
        [np.where(is_vision, image, -1), np.where(patch, line, -1), np.where(patch, column, -1)], axis=-1
    ).astype(np.int32)
