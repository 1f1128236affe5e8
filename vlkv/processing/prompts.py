"""Writes the text of a prompt from a question and the numbers of images and videos; each of them is one token.

In all families the user marks the place of an image with `<image>` and that of a video with `<video>`. Without marks
the images come first, then the videos, then the text. A backslash before a mark makes it ordinary text: `\\<image>`
asks about the word `<image>`. Prompts contain such text with the backslash; `Processor` removes it when it tokenises
them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Int

from vlkv.errors import InputError
from vlkv.processing.templates import ChatTemplate

MARKS = {"image": "<image>", "video": "<video>"}
_PROBE = "vlkvprobe"
# A later turn: an answer and the next question, and the question's numbers of images and videos, if it has any.
Turn: TypeAlias = tuple[str, str] | tuple[str, str, int, int]


def occurrences(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches these marks and tokens, except marks after a backslash, which are ordinary text."""
    return re.compile("|".join(rf"(?<!\\){text}" if text in MARKS.values() else re.escape(text) for text in texts))


def literal(text: str) -> str:
    """The text with a backslash before each mark, so that none stands for an image or a video."""
    return re.sub("|".join(MARKS.values()), r"\\\g<0>", text)


def without_backslashes(prompt: str) -> str:
    """The prompt with its marks as text: the inverse of `literal`."""
    return re.sub(rf"\\({'|'.join(MARKS.values())})", r"\1", prompt)


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The place of an image or a video in a prompt."""

    kind: str  # "image" or "video"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptWriter:
    """Writes the prompts of one checkpoint."""

    template: ChatTemplate | None
    image_token: str | None  # its text; None for a model without a tower
    special: Mapping[str, Any]  # variables of the template: special tokens, such as bos_token -> "<s>", and the user's
    video_token: str | None = None  # None for a family that does not support videos

    def write(self, text: str, images: int, videos: int = 0, then: Sequence[Turn] = ()) -> str:
        """The prompt up to the start of the model's next answer.

        Args:
            text: the question, with one mark for each image and video, or without marks. One line break after a mark
                belongs to the mark. A mark after a backslash is text.
            images: number of images.
            videos: number of videos.
            then: later turns. A mark in an answer is text.

        Raises:
            InputError: a text is empty, its marks do not match, or it contains the text of an image or video token.
        """
        asked = [self._split(text, {"image": images, "video": videos})]
        asked += [
            self._split(question, dict(zip(MARKS, counts or (0, 0), strict=True))) for _, question, *counts in then
        ]
        answers = [literal(answer) for answer, *_ in then]
        if self.template is None:
            return self._plain(asked, answers)
        items = self._takes_items(self.template)

        def message(role: str, pieces: Sequence[str | _Mark]) -> dict[str, Any]:
            return {"role": role, "content": [_item(p) for p in pieces] if items else self._inline(pieces)}

        messages = [message("user", asked[0])]
        for answer, pieces in zip(answers, asked[1:], strict=True):
            thought, said = _split_reasoning(answer) if self.template.reads_reasoning else (None, answer)
            reasoning = {} if thought is None else {"reasoning_content": thought}
            messages += [message("assistant", [said]) | reasoning, message("user", pieces)]
        return self.template.render(messages, self.special)

    def before_question(self, text: str, images: int, videos: int = 0) -> str:
        """The part of the prompt before the text after the last image. It is the same for every question.

        The arguments and errors are those of `write`; InputError also if no text follows the last image.
        """
        end = max((mark.end() for mark in occurrences(MARKS.values()).finditer(text)), default=0)
        if not text[end:].strip():
            raise InputError("no text follows the last image: put the question after it")
        before, separator, _ = self.write(text[:end] + _PROBE, images, videos).partition(_PROBE)
        if not separator or not self.write(text, images, videos).startswith(before):
            raise InputError("with this chat template, the text before the question depends on the question")
        return before

    @property
    def _tokens(self) -> dict[str, str | None]:
        return {"image": self.image_token, "video": self.video_token}

    def _split(self, text: str, counts: dict[str, int]) -> list[str | _Mark]:
        """The text in pieces, with marks for images and videos."""
        if not isinstance(text, str):
            raise InputError(f"a prompt must be a string, not {type(text).__name__}")
        pieces: list[str | _Mark] = [text]
        for kind, count in counts.items():
            pieces, marks = self._find(pieces, kind)
            if marks not in (0, count):
                raise InputError(f"the prompt has {marks} {MARKS[kind]} mark(s) for {count} {kind}(s); give one mark "
                                 f"per {kind}, or no marks; {literal(MARKS[kind])} is the word itself")  # fmt: skip
            if not marks:
                first = next((i for i, piece in enumerate(pieces) if isinstance(piece, str)), 0)
                pieces[first:first] = [_Mark(kind)] * count
        words = [piece for piece in pieces if isinstance(piece, str)]
        if not "".join(words).strip():
            raise InputError("the prompt is empty; give a question")
        for kind, token in self._tokens.items():
            if token is None and counts[kind]:
                what = "has no vision tower" if self.image_token is None else "does not support videos"
                raise InputError(f"the model {what}; remove the {kind}")
            if token is not None and any(occurrences([token]).search(piece) for piece in words):
                raise InputError(f"the prompt contains the model's {kind} token {token!r}; mark {kind}s "
                                 f"with {MARKS[kind]}")  # fmt: skip
        return [piece for piece in pieces if isinstance(piece, _Mark) or piece.strip()] if len(pieces) > 1 else pieces

    def _find(self, pieces: list[str | _Mark], kind: str) -> tuple[list[str | _Mark], int]:
        """The pieces, split at the marks of one kind, and the number of these marks."""
        if kind == "video" and self.video_token is None:  # then the mark is ordinary text
            return pieces, 0
        cut: list[str | _Mark] = []
        for piece in pieces:
            if isinstance(piece, _Mark):
                cut.append(piece)
                continue
            first, *following = occurrences([MARKS[kind]]).split(piece)
            cut.append(first)
            for part in following:
                cut += [_Mark(kind), part.removeprefix("\n")]
        return cut, sum(isinstance(piece, _Mark) and piece.kind == kind for piece in cut)

    def _inline(self, pieces: Sequence[str | _Mark]) -> str:
        return "".join(piece if isinstance(piece, str) else f"{self._tokens[piece.kind]}\n" for piece in pieces)

    def _plain(self, asked: list[list[str | _Mark]], answers: list[str]) -> str:
        inline = [self._inline(pieces) for pieces in asked]
        return inline[0] + "".join(f"{a}\n{q}" for a, q in zip(answers, inline[1:], strict=True))

    def _takes_items(self, template: ChatTemplate) -> bool:
        """Whether the template accepts a list of items as content; if not, it needs one string."""
        if self.image_token is None and self._shows_probe(template, _PROBE):
            return False
        return self._shows_probe(template, [{"type": "text", "text": _PROBE}])

    def _shows_probe(self, template: ChatTemplate, content: object) -> bool:
        """Whether the prompt contains the text of this content, and not the printed form of a Python list."""
        try:
            written = template.render([{"role": "user", "content": content}], self.special)
        except InputError:
            return False
        printed = (f"'text': '{_PROBE}'", f'"text": "{_PROBE}"')
        return _PROBE in written and not any(form in written for form in printed)


def _split_reasoning(answer: str) -> tuple[str | None, str]:
    """The reasoning of an answer, None if it has none, and the rest; split as the templates of Qwen3 do."""
    thought, end, said = answer.rpartition("</think>")
    return (thought.split("<think>")[-1].strip("\n"), said.lstrip("\n")) if end else (None, answer)


def _item(piece: str | _Mark) -> dict[str, str]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else {"type": piece.kind}


def joined(context: str, question: str) -> str:
    """The text of a message with a context and a question; a line break separates them if no white space does."""
    return separated(context, "\n", question) + question


def separated(text: str, separator: str, following: str) -> str:
    """The text, and the separator if there is no white space between the text and what follows it."""
    return text if not text or text[-1].isspace() or following[:1].isspace() else text + separator


def context_part(prompts: PromptWriter, context: str, question: str, images: int, videos: int = 0) -> str:
    """The prompt up to where the question begins. It is the same for all questions that begin alike with white space.

    The context may have marks for the images; "": it consists of images. The question has none. Raises InputError as
    `PromptWriter.write`; also if the context is not the beginning of the prompt.
    """
    if not context:
        return prompts.before_question(question, images, videos)
    before, separator, _ = prompts.write(separated(context, "\n", question) + _PROBE, images, videos).rpartition(_PROBE)
    if not separator or not prompts.write(joined(context, question), images, videos).startswith(before):
        raise InputError("the prompt does not begin with the context: mark images only in the context, or use a chat "
                         "template that does not depend on the question")  # fmt: skip
    return before


def shared(first: Int[np.ndarray, " T"], others: Sequence[Int[np.ndarray, " _t"]]) -> int:
    """The number of ids at the beginning of `first` with which all `others` begin too."""
    count = len(first)
    for ids in others:
        count = min(count, len(ids))
        count = int(next(iter(np.flatnonzero(first[:count] != ids[:count])), count))
    return count


def end_of_answer(prompt: str, begin: int, answer: str) -> int | None:
    """Where the answer ends that a prompt repeats at `begin`, perhaps without the white space around it; or None."""
    place, behind = prompt.find(answer.strip(), begin), answer[len(answer.rstrip()) :]
    if place < 0 or prompt[begin:place].strip():
        return None
    end = place + len(answer.strip())
    return end + len(behind) if prompt.startswith(behind, end) else end
