"""From a question and a number of images and videos to the prompt's text, in which each is one token.

A user marks the place of an image with `<image>`, of a video with `<video>`, whatever the checkpoint's own tokens are
spelled like. Without marks they come first, images before videos.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlkv.errors import InputError
from vlkv.processing.templates import ChatTemplate

MARKS = {"image": "<image>", "video": "<video>"}
_PROBE = "vlkvprobe"


@dataclasses.dataclass(frozen=True)
class _Mark:
    """A place where an image or a video goes."""

    kind: str  # "image" or "video"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptWriter:
    """Writes the prompts of one checkpoint."""

    template: ChatTemplate | None
    image_token: str | None  # as the tokenizer spells it; None for a model without a tower
    special: Mapping[str, str]  # names of special tokens, for the template
    video_token: str | None = None  # None for a family that takes no video

    def write(self, text: str, images: int, videos: int = 0) -> str:
        """The prompt.

        Args:
            text: the question, with one mark for each image and video, or none at all. One line break after a mark
                is taken as part of the mark.
            images: how many images the prompt is about.
            videos: how many videos.

        Raises:
            InputError: the text is empty, its marks do not match, or it spells one of the model's own tokens.
        """
        pieces = self._split(text, {"image": images, "video": videos})
        if self.template is None:
            return self._plain(pieces)
        if self._takes_items(self.template):
            content: Any = [_item(piece) for piece in pieces]
        else:
            content = self._inline(pieces)
        return self.template.render([{"role": "user", "content": content}], self.special)

    @property
    def _tokens(self) -> dict[str, str | None]:
        return {"image": self.image_token, "video": self.video_token}

    def _split(self, text: str, counts: dict[str, int]) -> list[str | _Mark]:
        """The text in pieces, with marks where images and videos go."""
        if not isinstance(text, str):
            raise InputError(f"a prompt must be a string, not {type(text).__name__}")
        pieces: list[str | _Mark] = [text]
        for kind, count in counts.items():
            pieces, found = self._find(pieces, kind)
            if found not in (0, count):
                raise InputError(f"the prompt has {found} {MARKS[kind]} mark(s) for {count} {kind}(s); "
                                 "one mark for each, or none")  # fmt: skip
            if not found:
                first = next((i for i, piece in enumerate(pieces) if isinstance(piece, str)), 0)
                pieces[first:first] = [_Mark(kind)] * count
        words = [piece for piece in pieces if isinstance(piece, str)]
        if not "".join(words).strip():
            raise InputError("the prompt is empty; ask something")
        for kind, token in self._tokens.items():
            if token is None and counts[kind]:
                what = "has no vision tower and" if self.image_token is None else "takes no video: it"
                raise InputError(f"the model {what} cannot be given {'an image' if kind == 'image' else 'a video'}; "
                                 f"drop the {kind}")  # fmt: skip
            if token is not None and any(token in piece for piece in words):
                raise InputError(f"the prompt spells the model's {kind} token {token!r}; mark {kind}s "
                                 f"with {MARKS[kind]}")  # fmt: skip
        return [piece for piece in pieces if isinstance(piece, _Mark) or piece.strip()] if len(pieces) > 1 else pieces

    def _find(self, pieces: list[str | _Mark], kind: str) -> tuple[list[str | _Mark], int]:
        """The pieces cut at the marks of one kind, and how many there were."""
        if kind == "video" and self.video_token is None:  # then the mark is nothing but text
            return pieces, 0
        cut: list[str | _Mark] = []
        for piece in pieces:
            if isinstance(piece, _Mark):
                cut.append(piece)
                continue
            first, *rest = piece.split(MARKS[kind])
            cut.append(first)
            for part in rest:
                cut += [_Mark(kind), part.removeprefix("\n")]
        return cut, sum(isinstance(piece, _Mark) and piece.kind == kind for piece in cut)

    def _inline(self, pieces: list[str | _Mark]) -> str:
        return "".join(piece if isinstance(piece, str) else f"{self._tokens[piece.kind]}\n" for piece in pieces)

    def _plain(self, pieces: list[str | _Mark]) -> str:
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


def _item(piece: str | _Mark) -> dict[str, str]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else {"type": piece.kind}
