"""Inputs: what the processor hands to the model, a pytree whose static bounds decide what jit traces.

Axes: B batch · T padded prompt length · A position axes (1; 3 for M-RoPE) · I images, tiles or frames
of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from vlkv.buckets import Buckets, round_up
from vlkv.config import ModelConfig
from vlkv.errors import InputError

# numpy as the processor makes them, jax once inside jit.
if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = np.ndarray | jax.Array


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
    pixels: Float[AnyArray, I * pixels] | None  # as the family's tower takes them
    # For pictures that are cut into tiles: the number of the token's tile in the row; and, for a token of the view of
    # the whole picture, the number of the tile that shows the same place larger. -1: none. None: no picture is cut.
    parts: Int[AnyArray, "B T 2"] | None = None
    # What the wiring must know of the pixels; see the family's inputs.py.
    layout: dict[str, AnyArray] = dataclasses.field(default_factory=dict)
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
        """From what the family's transformers processor returns: input_ids, attention_mask, pixel_values and so on.

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
        longest = int(valid.sum(axis=1).max())
        if longest > config.decoder.max_positions:
            raise InputError(f"the prompt has {longest} tokens, the model's limit is {config.decoder.max_positions}")
        text = tokens[valid & ((tokens != config.image_token) | (config.image_token is None))]
        if (text < 0).any() or (text >= config.decoder.vocab_size).any():
            raise InputError(f"a token id lies outside the vocabulary of {config.decoder.vocab_size}")
        made = config.arrange(batch, tokens, valid, buckets)

        is_vision, place = made.vision_index >= 0, np.arange(tokens.shape[1])
        last_vision = np.where(is_vision, place, -1).max(axis=1)  # -1: a row without an image is all instruction
        instruction = (valid & (place > last_vision[:, None])).sum(axis=1)
        max_text = round_up(int((valid & ~is_vision).sum(axis=1).max()), buckets.text)
        pad = [(0, 0), (0, max(0, made.max_vision + max_text - tokens.shape[1]))]
        return cls(
            # The image's token may stand outside the vocabulary.
            tokens=np.pad(np.where(valid & (tokens < config.decoder.vocab_size), tokens, 0), pad),
            positions=np.pad(made.positions, [*pad, (0, 0)]),
            valid=np.pad(valid, pad),
            vision_index=np.pad(made.vision_index, pad, constant_values=-1),
            grid=np.pad(made.grid, [*pad, (0, 0)], constant_values=-1),
            pixels=made.pixels,
            parts=None if made.parts is None else np.pad(made.parts, [*pad, (0, 0)], constant_values=-1),
            layout=made.layout,
            max_vision=made.max_vision,
            max_text=max_text,
            max_instruction=min(max_text, round_up(int(instruction.max()), buckets.text)),
            max_images=made.max_images,
        )
