"""`Processor`: pictures and questions in, `Inputs` out; tokens in, text out.

Axes: B batch · T tokens.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Int

from vlkv.buckets import Buckets
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing.arranging import TextInputs
from vlkv.processing.images import Picture
from vlkv.processing.pictures import Pictures, Read, Video
from vlkv.processing.pixels import Layout
from vlkv.processing.prompts import MARKS, PromptWriter
from vlkv.processing.tokenizer import Lengths, TextTokenizer

RowImages: TypeAlias = Picture | Video | Sequence[Picture | Video] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """What a checkpoint folder says about its inputs and outputs; runs on the host alone."""

    config: TextInputs
    tokenizer: TextTokenizer
    prompts: PromptWriter
    pictures: Pictures | None  # None: a model without a tower
    buckets: Buckets

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        config: TextInputs,
        *,
        buckets: Buckets | None = None,
        layout: Layout = "checkpoint",
    ) -> Processor:
        """Reads the tokenizer, the chat template and the image settings of a folder.

        Args:
            folder: a Hugging Face checkpoint, or one written by `vlkv convert`.
            config: the model's config (`params.config`).
            buckets: how to round lengths and counts; None for the defaults.
            layout: what becomes of a picture that is not square: `checkpoint` as the folder says (often the
                middle is cut out), `pad` to a square with the mean colour.

        Raises:
            InputError: a file is missing, damaged, or says something that we do not honour.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        if layout not in ("checkpoint", "pad"):
            raise InputError(f"layout={layout!r} is neither 'checkpoint' nor 'pad'")
        tokenizer = TextTokenizer.from_folder(folder)
        if config.image_token == config.decoder.vocab_size:  # the model has none: any id that no text has will do
            config = dataclasses.replace(config, image_token=tokenizer.add(MARKS["image"]))
        tokens = {kind: _spelling(folder, tokenizer, getattr(config, f"{kind}_token")) for kind in MARKS}
        pictures = config.open_pictures(folder, layout)
        tokens |= {} if pictures is None else pictures.spelled
        return cls(
            config=config,
            tokenizer=tokenizer,
            prompts=PromptWriter(
                template=config.template(folder),
                image_token=tokens["image"],
                video_token=tokens["video"],
                special=tokenizer.special,
            ),
            pictures=pictures,
            buckets=buckets or Buckets(),
        )

    def __call__(
        self, images: RowImages | Sequence[RowImages], text: str | Sequence[str], *, question: bool = True
    ) -> Inputs:
        """One question, or a batch of them.

        Args:
            images: for one question: an image (a path, bytes, a PIL image or an array), a list of them, or None. For a
                list of questions: a list with such an entry for each, or None.
            text: one question, or a list. `<image>` marks where an image goes; without marks they come first.
            question: False stops before the text after the last image, which `extension` gives to `vlkv.extend`: so
                what a policy keeps does not depend on what will be asked.

        Returns:
            A batch with one row per question, padded on the right.

        Raises:
            InputError: an image that cannot be used, marks that do not match the images, an empty question,
                or a prompt beyond the model's limit.
        """
        rows, texts = _rows(images, text)
        # Before anything is read, what is wrong with the text.
        rows = [self._as_written(one, row) for row, one in zip(rows, texts, strict=True)]
        reads = [self._read(row) for row in rows]
        write = self.prompts.write if question else self.prompts.before_question
        prompts = [
            self._ids(write(one, *count(row)), row, read) for row, one, read in zip(rows, texts, reads, strict=True)
        ]
        return self._batch(prompts, [read for row in reads for read in row])

    def extension(self, before: Sequence[str], after: Sequence[str]) -> Inputs:
        """What `vlkv.extend` must be given, so that caches of the prompts `before` hold the prompts `after`.

        Args:
            before: a prompt of each row, as `prompts.write` or `prompts.before_question` wrote it.
            after: longer ones, of more turns or with the question; they show no image more.

        Raises:
            InputError: a prompt does not begin with the one before, or is no longer than it.
        """
        return self._batch([self.beyond(*pair) for pair in zip(before, after, strict=True)], [])

    def beyond(self, before: str, after: str) -> Int[np.ndarray, " T"]:
        """The ids by which one written prompt is longer than another; raises InputError as `extension`."""
        if not after.startswith(before) or len(after) == len(before):
            raise InputError("the chat template does not write a longer conversation as the shorter one and a rest")
        shorter, longer = self._encode(before), self._encode(after)
        if len(longer) > len(shorter) and np.array_equal(longer[: len(shorter)], shorter):
            return longer[len(shorter) :]
        return self.tokenizer.encode(after[len(before) :], add_special=False)  # a token reaches over the seam

    def _encode(self, prompt: str) -> Int[np.ndarray, " T"]:
        # As transformers does: for a text model the template alone writes the special tokens.
        return self.tokenizer.encode(prompt, add_special=self.prompts.template is None or self.pictures is not None)

    def _batch(self, prompts: Sequence[Int[np.ndarray, " T"]], reads: Sequence[Read]) -> Inputs:
        """Rows of ids, padded on the right, and their pictures."""
        longest = max(len(prompt) for prompt in prompts)
        ids = np.zeros((len(prompts), longest), np.int32)
        mask = np.zeros((len(prompts), longest), bool)
        for row_index, prompt in enumerate(prompts):
            ids[row_index, : len(prompt)] = prompt
            mask[row_index, : len(prompt)] = True
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.pictures is not None:
            batch |= self.pictures.batch(reads)
        return Inputs.from_hf(batch, self.config, self.buckets)

    def tokens(
        self, text: str, pictures: Sequence[Picture | Video] = (), reads: Sequence[Read] = ()
    ) -> Int[np.ndarray, " T"]:
        """The ids of one prompt, each picture's token repeated once for every vision token of it.

        Args:
            text: the question, marked or not.
            pictures: what it is about.
            reads: the same, read, in the same order.

        Raises:
            InputError: as `__call__`; also where the prompt's image tokens are not as many as the images.
        """
        return self._ids(self.prompts.write(text, *count(pictures)), pictures, reads)

    def _ids(self, prompt: str, pictures: Sequence[Picture | Video], reads: Sequence[Read]) -> Int[np.ndarray, " T"]:
        spelled_out = any(read.text is not None for read in reads)
        if spelled_out:
            prompt = self._spell_out(prompt, pictures, reads)
        ids = self._encode(prompt)
        if not ids.size:
            raise InputError("the prompt is empty: the tokenizer makes no token of it")
        if spelled_out:
            _check_count("image", int((ids == self.config.image_token).sum()), sum(read.tokens for read in reads))
            return ids
        repeats = np.ones(len(ids), np.int64)
        own = {kind: getattr(self.config, f"{kind}_token") for kind in MARKS}
        for kind in MARKS:  # of both kinds at once where they share a token
            alike = [other for other in MARKS if own[other] == own[kind]]
            wanted = [read.tokens for picture, read in zip(pictures, reads, strict=True) if _kind(picture) in alike]
            places = np.flatnonzero(ids == own[kind])
            # In ids, so that no spelling in the user's text can pass for an image.
            _check_count(kind, len(places), len(wanted))
            repeats[places] = wanted
        return np.repeat(ids, repeats)

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

    def pieces(self, tokens: Iterable[Any]) -> Iterator[str]:
        """The text of one row, piece by piece as its tokens come, without special tokens.

            for piece in processor.pieces(vlkv.stream(params, inputs)):
                print(piece, end="", flush=True)

        Args:
            tokens: ids, or arrays of one id as `vlkv.stream` yields them.
        """
        seen: list[int] = []
        text = said = ""
        for token in tokens:
            seen.append(int(np.asarray(token).reshape(())))
            text = str(self.decode(np.array(seen, np.int32)))
            if len(text) > len(said) and not text.endswith("\ufffd"):  # half a character
                yield text[len(said) :]
                said = text
        if len(text) > len(said):
            yield text[len(said) :]

    def _as_written(self, text: str, row: Sequence[Picture | Video]) -> list[Picture | Video]:
        """The pictures of a row in the order in which its prompt shows them; raises InputError as `write` does."""
        prompt = self.prompts.write(text, *count(row))
        own = {"image": self.prompts.image_token, "video": self.prompts.video_token}
        if own["image"] == own["video"]:  # the prompt cannot tell them apart, the marks can
            kinds = {mark: kind for kind, mark in MARKS.items()}
            order = [kinds[mark] for mark in re.findall("|".join(MARKS.values()), text)]
        else:
            kinds = {token: kind for kind, token in own.items() if token is not None}
            order = [kinds[token] for token in re.findall("|".join(map(re.escape, kinds)), prompt)] if row else []
        queues = {kind: [picture for picture in row if _kind(picture) == kind] for kind in MARKS}
        # What the template shows too often or not at all is found out by the count of ids.
        shown = [queues[kind].pop(0) for kind in order if queues[kind]]
        return shown + [picture for queue in queues.values() for picture in queue]

    def _spell_out(self, prompt: str, pictures: Sequence[Picture | Video], reads: Sequence[Read]) -> str:
        """The prompt with each picture's own text in the place of its token."""
        texts = {}
        for kind, token in (("image", self.prompts.image_token), ("video", self.prompts.video_token)):
            found = [read.text for picture, read in zip(pictures, reads, strict=True) if _kind(picture) == kind]
            if token is not None:
                _check_count(kind, prompt.count(token), len(found))
                texts[token] = iter(found)
        return re.sub("|".join(map(re.escape, texts)), lambda match: next(texts[match[0]]) or match[0], prompt)

    def _read(self, row: Sequence[Picture | Video]) -> list[Read]:
        if not row:
            return []
        assert self.pictures is not None  # or the prompt had raised
        images = count(row).images
        return [self.pictures.read(picture, images=images) for picture in row]


def _spelling(folder: Path, tokenizer: TextTokenizer, token: int | None) -> str | None:
    """How the tokenizer spells one of the config's own tokens."""
    if token is None:
        return None
    text = tokenizer.tokenizer.id_to_token(token)
    if text is None:
        raise InputError(
            f"{folder / 'tokenizer.json'}: has no token {token}, which config.json "
            "names as the image token; the two files are not of one checkpoint"
        )
    return text


def _check_count(kind: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise InputError(f"the prompt holds {found} {kind} token(s) for {wanted}; mark {kind}s with {MARKS[kind]} only")


def _kind(picture: Picture | Video) -> str:
    return "video" if isinstance(picture, Video) else "image"


class _Count(NamedTuple):
    images: int
    videos: int


def count(pictures: Sequence[Picture | Video]) -> _Count:
    """How many images and how many videos."""
    videos = sum(isinstance(picture, Video) for picture in pictures)
    return _Count(len(pictures) - videos, videos)


def _rows(images: object, text: object) -> tuple[list[list[Picture | Video]], list[str]]:
    """The images of each row, and its text."""
    if not isinstance(text, list | tuple):
        return [as_list(images)], [text]  # type: ignore[list-item]
    texts = list(text)
    if not texts:
        raise InputError("the list of prompts is empty")
    if images is None:
        return [[] for _ in texts], texts
    if not isinstance(images, list | tuple) or len(images) != len(texts):
        given = f"a list of {len(images)}" if isinstance(images, list | tuple) else "a single image"
        raise InputError(
            f"{len(texts)} prompts need a list of {len(texts)} entries, each an image, a list of images or "
            f'None, not {given}; one question about several images: processor([a, b], "question")'
        )
    return [as_list(entry) for entry in images], texts


def as_list(entry: object) -> list[Picture | Video]:
    """What `Processor` takes as the images of one question, as a list."""
    if entry is None:
        return []
    return list(entry) if isinstance(entry, list | tuple) else [entry]  # type: ignore[list-item]
