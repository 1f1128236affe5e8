"""From a question and a number of images to the prompt's text, in which each image is one image token.

A user marks the place of an image with `<image>`, whatever the checkpoint's own image token is spelled like.
Without marks the images come first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.errors import InputError
from vlkv.processing.templates import ChatTemplate

MARK = "<image>"
_PROBE = "vlkvprobe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptWriter:
    """Writes the prompts of one checkpoint."""

    template: ChatTemplate | None
    image_token: str | None  # as the tokenizer spells it; None for a model without a tower
    special: Mapping[str, str]  # names of special tokens, for the template

    def write(self, text: str, images: int) -> str:
        """The prompt.

        Args:
            text: the question, with one `<image>` for each image, or none at all. One line break after a mark
                is taken as part of the mark.
            images: how many images the prompt is about.

        Raises:
            InputError: the text is empty, its marks do not match the images, or it spells the image token.
        """
        pieces = self._split(text, images)
        if self.template is None:
            return self._plain(pieces)
        if self._takes_items(self.template):
            content: Any = [_item(piece) for piece in pieces]
        else:
            content = self._inline(pieces)
        return self.template.render([{"role": "user", "content": content}], self.special)

    def _split(self, text: str, images: int) -> list[str | None]:
        """The text in pieces, with None where an image goes."""
        if not isinstance(text, str):
            raise InputError(f"a prompt must be a string, not {type(text).__name__}")
        if not text.replace(MARK, "").strip():
            raise InputError("the prompt is empty; ask something")
        if self.image_token is None and images:
            raise InputError("the model has no vision tower and cannot be given an image; drop the image")
        parts = text.split(MARK)
        marks = len(parts) - 1
        if marks not in (0, images):
            raise InputError(
                f"the prompt has {marks} {MARK} mark(s) for {images} image(s); one mark per image, or none"
            )
        if self.image_token is not None and any(self.image_token in part for part in parts):
            raise InputError(f"the prompt spells the model's image token {self.image_token!r}; mark images with {MARK}")
        if marks == 0:
            return [None] * images + [text]
        pieces: list[str | None] = [parts[0]]
        for part in parts[1:]:
            pieces += [None, part.removeprefix("\n")]
        return [piece for piece in pieces if piece is None or piece.strip()]

    def _inline(self, pieces: list[str | None]) -> str:
        return "".join(f"{self.image_token}\n" if piece is None else piece for piece in pieces)

    def _plain(self, pieces: list[str | None]) -> str:
        """Without a template: LLaVA-1.5's own conversation, or the bare text for a text model."""
        inline = self._inline(pieces)
        return inline if self.image_token is None else f"USER: {inline} ASSISTANT:"

    def _takes_items(self, template: ChatTemplate) -> bool:
        """Whether the template understands a list of items, or wants one string; most know only one."""
        if self.image_token is None and self._shows_probe(template, _PROBE):
            return False
        return self._shows_probe(template, [{"type": "text", "text": _PROBE}])

    def _shows_probe(self, template: ChatTemplate, content: object) -> bool:
        """Whether this content reaches the prompt, and not as the printed form of a Python list."""
        try:
            written = template.render([{"role": "user", "content": content}], self.special)
        except InputError:
            return False
        printed = (f"'text': '{_PROBE}'", f'"text": "{_PROBE}"')
        return _PROBE in written and not any(form in written for form in printed)


def _item(piece: str | None) -> dict[str, str]:
    return {"type": "image"} if piece is None else {"type": "text", "text": piece}
