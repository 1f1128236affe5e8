"""`Processor`: pictures and questions in, `Inputs` out; tokens in, text out.

Axes: B batch · T tokens.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from vlkv.config import ModelConfig
from vlkv.errors import InputError
from vlkv.inputs import Buckets, Inputs
from vlkv.processing.images import Picture, open_image
from vlkv.processing.pixels import Layout, PixelSettings, read_settings, to_pixels
from vlkv.processing.prompts import PromptWriter
from vlkv.processing.templates import ChatTemplate
from vlkv.processing.tokenizer import Lengths, TextTokenizer

RowImages: TypeAlias = Picture | Sequence[Picture] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """What a checkpoint folder says about its inputs and outputs; runs on the host alone."""

    config: ModelConfig
    tokenizer: TextTokenizer
    prompts: PromptWriter
    settings: PixelSettings | None  # None: a model without a tower
    buckets: Buckets

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        config: ModelConfig,
        *,
        buckets: Buckets | None = None,
        layout: Layout = "checkpoint",
    ) -> Processor:
        """Reads the tokenizer, the chat template and the image settings of a folder.

        Args:
            folder: a Hugging Face checkpoint, or one written by `vlkv convert`.
            config: the model's config (`params.config`).
            buckets: how to round lengths and counts; None for the defaults.
            layout: what becomes of a picture that is not square: `checkpoint` as the folder says (LLaVA-1.5:
                the middle is cut out), `pad` to a square with the mean colour, as LLaVA was trained.

        Raises:
            InputError: a file is missing, damaged, or says something that we do not honour.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        if layout not in ("checkpoint", "pad"):
            raise InputError(f"layout={layout!r} is neither 'checkpoint' nor 'pad'")
        tokenizer = TextTokenizer.from_folder(folder)
        image_token = None
        if config.vision is not None and config.image_token is not None:
            image_token = tokenizer.tokenizer.id_to_token(config.image_token)
            if image_token is None:
                raise InputError(
                    f"{folder / 'tokenizer.json'}: has no token {config.image_token}, which config.json "
                    "names as the image token; the two files are not of one checkpoint"
                )
        return cls(
            config=config,
            tokenizer=tokenizer,
            prompts=PromptWriter(
                template=ChatTemplate.from_folder(folder), image_token=image_token, special=tokenizer.special
            ),
            settings=read_settings(folder, layout) if config.vision is not None else None,
            buckets=buckets or Buckets(),
        )

    def __call__(self, images: RowImages | Sequence[RowImages], text: str | Sequence[str]) -> Inputs:
        """One question, or a batch of them.

        Args:
            images: for one question: an image (a path, bytes or a PIL image), a list of them, or None. For a
                list of questions: a list with such an entry for each, or None.
            text: one question, or a list. `<image>` marks where an image goes; without marks they come first.

        Returns:
            A batch with one row per question, padded on the right.

        Raises:
            InputError: an image that cannot be used, marks that do not match the images, an empty question,
                or a prompt beyond the model's limit.
        """
        rows, texts = _rows(images, text)
        prompts = [self.tokens(one, len(row)) for row, one in zip(rows, texts, strict=True)]
        pixels = [self._pixels(picture) for row in rows for picture in row]
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), np.int32)
        mask = np.zeros((len(prompts), longest), bool)
        for row_index, prompt in enumerate(prompts):
            ids[row_index, : len(prompt)] = prompt
            mask[row_index, : len(prompt)] = True
        stacked = np.stack(pixels) if pixels else None
        batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": stacked}
        return Inputs.from_hf(batch, self.config, self.buckets)

    def tokens(self, text: str, images: int = 0) -> Int[np.ndarray, " T"]:
        """The ids of one prompt, the image token repeated once for every vision token of its image.

        Raises:
            InputError: as `__call__`; also where the prompt's image tokens are not as many as the images.
        """
        prompt = self.prompts.write(text, images)
        # As transformers does: for a text model the template alone writes the special tokens.
        add_special = self.prompts.template is None or self.config.vision is not None
        ids = self.tokenizer.encode(prompt, add_special=add_special)
        if not ids.size:
            raise InputError("the prompt is empty: the tokenizer makes no token of it")
        if self.config.vision is None:
            return ids
        is_image = ids == self.config.image_token
        if is_image.sum() != images:
            # Counted in ids, so that no spelling in the user's text can pass for an image.
            raise InputError(
                f"the prompt holds {is_image.sum()} image token(s) for {images} image(s); mark images with <image> only"
            )
        return np.repeat(ids, np.where(is_image, self.config.vision.tokens, 1))

    def decode(
        self,
        tokens: Int[np.ndarray | jax.Array, "*B T"],
        lengths: Lengths = None,
    ) -> str | list[str]:
        """The text of one row [T], or a list with the text of each row of [B, T], without special tokens.

        Args:
            tokens: generated ids; a row ends at the model's first stop token.
            lengths: how many tokens of each row count; None for all.
        """
        return self.tokenizer.decode(tokens, lengths, stop=self.config.stop)

    def _pixels(self, picture: Picture) -> np.ndarray:
        assert self.settings is not None and self.config.vision is not None  # or the prompt had raised
        pixels = to_pixels(open_image(picture), self.settings)
        side = self.config.vision.image_size
        if pixels.shape != (3, side, side):
            raise InputError(
                f"the image processor config makes {pixels.shape[1]} x {pixels.shape[2]} pixels, but the "
                f"tower in config.json takes {side} x {side}: the files are not of one checkpoint"
            )
        return pixels


def _rows(images: object, text: object) -> tuple[list[list[Picture]], list[str]]:
    """The images of each row, and its text."""
    if not isinstance(text, list | tuple):
        return [_as_list(images)], [text]  # type: ignore[list-item]
    texts = list(text)
    if not texts:
        raise InputError("the list of prompts is empty")
    if images is None:
        return [[] for _ in texts], texts
    if not isinstance(images, list | tuple) or len(images) != len(texts):
        given = f"a list of {len(images)}" if isinstance(images, list | tuple) else "a single image"
        raise InputError(
            f"{len(texts)} prompts need a list of {len(texts)} entries, each an image, a list of images or "
            f"None, not {given}"
        )
    return [_as_list(entry) for entry in images], texts


def _as_list(entry: object) -> list[Picture]:
    if entry is None:
        return []
    return list(entry) if isinstance(entry, list | tuple) else [entry]  # type: ignore[list-item]
