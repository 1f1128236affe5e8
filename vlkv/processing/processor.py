"""`Processor` converts images and questions to `Inputs`, and tokens to text. A picture is an image or a video.

Axes: B batch · T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jaxtyping import Int

from vlkv.buckets import Buckets
from vlkv.errors import InputError
from vlkv.inputs import Inputs
from vlkv.processing.host import HostConfig
from vlkv.processing.images import Picture
from vlkv.processing.pictures import Pictures, Read, RowImages, Video, as_list, count, rows_of
from vlkv.processing.pixels import Layout
from vlkv.processing.prompts import MARKS, PromptWriter, literal, occurrences, without_backslashes
from vlkv.processing.tokenizer import Lengths, TextTokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processor:
    """Prepares the inputs of one checkpoint and decodes its outputs, on the host."""

    config: HostConfig
    tokenizer: TextTokenizer
    prompts: PromptWriter
    pictures: Pictures | None  # None: a model without a tower
    buckets: Buckets

    @classmethod
    def from_folder(
        cls,
        folder: str | os.PathLike[str],
        config: HostConfig,
        *,
        buckets: Buckets | None = None,
        layout: Layout = "checkpoint",
    ) -> Processor:
        """Reads the tokenizer, the chat template and the image settings of a folder.

        Args:
            folder: a Hugging Face checkpoint, or one written by `vlkv convert`.
            config: the model's config (`params.config`).
            buckets: how to round lengths and counts; None for the defaults.
            layout: for images that are not square: `checkpoint`: as the folder says (often a crop of the middle);
                `pad`: pad to a square with the mean colour; `pan_and_scan`: add crops of long images (Gemma 3).

        Raises:
            InputError: a file is missing, damaged, or has unsupported values.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder")
        if layout not in (layouts := get_args(Layout)):
            raise InputError(f"layout={layout!r} must be one of {', '.join(layouts)}")
        tokenizer = TextTokenizer.from_folder(folder)
        if config.image_token == config.decoder.vocab_size:  # the vocabulary has no image token, so add one
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

    def with_template(self, **variables: Any) -> Processor:
        """A processor whose chat template gets these variables, for example `enable_thinking=False`.

        Raises:
            InputError: the template does not read a variable.
        """
        template = self.prompts.template
        read = frozenset[str]() if template is None else template.variables
        for name in variables.keys() - read:
            raise InputError(
                f"the chat template does not read {name!r}; it reads {', '.join(sorted(read)) or 'nothing'}"
            )
        prompts = dataclasses.replace(self.prompts, special={**self.prompts.special, **variables})
        return dataclasses.replace(self, prompts=prompts)

    def __call__(
        self, images: RowImages | Sequence[RowImages], text: str | Sequence[str], *, query_agnostic: bool = False
    ) -> Inputs:
        """The inputs of one question, or of a batch of questions.

        Args:
            images: for one question: an image (a path, bytes, a PIL image or an array), a list of them, or None. For a
                list of questions: a list with such an entry for each, or None.
            text: one question, or a list. `<image>` marks the place of an image; without marks, images come first.
                A backslash before a mark makes it ordinary text.
            query_agnostic: stop before the text after the last image, so that the compressed cache does not depend on
                the question. `extension` makes this text for `vlkv.extend`.

        Returns:
            A batch with one row per question, padded on the right.

        Raises:
            InputError: an image that cannot be used, marks that do not match the images, an empty question,
                or a prompt beyond the model's limit.
        """
        rows, texts = rows_of(images, text)
        # Checks the texts before any image is opened.
        rows = [self.in_order(question, row) for row, question in zip(rows, texts, strict=True)]
        reads = [self._read(row) for row in rows]
        write = self.prompts.before_question if query_agnostic else self.prompts.write
        prompts = [
            self._ids(write(question, *count(row)), row, read)
            for row, question, read in zip(rows, texts, reads, strict=True)
        ]
        return self.batch(prompts, [read for row in reads for read in row])

    def extension(self, before: Sequence[str], after: Sequence[str], images: Sequence[RowImages] = ()) -> Inputs:
        """The inputs for `vlkv.extend` that turn caches of the prompts `before` into caches of the prompts `after`.

        Args:
            before: one prompt per row, from `prompts.write` or `prompts.before_question`.
            after: the same prompts with the question or further turns.
            images: new images and videos of each row, in the order of its prompt; (): there are none.

        Raises:
            InputError: a prompt of `after` does not start with that of `before`, or is not longer; an unusable image.
        """
        rows = [as_list(row) for row in images or [None] * len(before)]
        reads = [self._read(row) for row in rows]
        prompts = [self.beyond(*of_row) for of_row in zip(before, after, rows, reads, strict=True)]
        return self.batch(prompts, [read for row in reads for read in row])

    def beginning(self, part: str, pictures: Sequence[Picture | Video]) -> Inputs:
        """The inputs of the part of a prompt that begins it, with these pictures in the order of their marks."""
        reads = self._read(pictures)
        return self.batch([self._ids(part, pictures, reads)], reads)

    def part(self, video: Video) -> Inputs:
        """The inputs for `vlkv.extend` of frames at the place of a video in a prompt; see `Video.begin`."""
        if self.pictures is None or self.prompts.video_token is None:
            raise InputError("the model does not support videos; give the frames as images")
        read = self.pictures.read(video)
        text = self._spell_out(self.prompts.video_token, [video], [read])
        return self.batch([self._repeated(self.encode(text, begin=False), [video], [read])], [read])

    def beyond(
        self, before: str, after: str, pictures: Sequence[Picture | Video] = (), reads: Sequence[Read] = ()
    ) -> Int[np.ndarray, " T"]:
        """`extension` of one row: the ids that follow. `reads` are the new pictures, converted by `Pictures.read`."""
        if not after.startswith(before) or len(after) == len(before):
            raise InputError("the chat template changes earlier turns of a longer conversation, so the cache of the "
                             "shorter one cannot be extended")  # fmt: skip
        new = self._spell_out(after[len(before) :], pictures, reads)
        shorter, longer = self.encode(before), self.encode(before + new)
        ids = longer[len(shorter) :]
        if not len(ids) or not np.array_equal(longer[: len(shorter)], shorter):
            ids = self.encode(new, begin=False)  # a token crosses the end of `before`
        return self._repeated(ids, pictures, reads)

    def encode(self, prompt: str, *, begin: bool = True) -> Int[np.ndarray, " T"]:
        """The ids of (a part of) a prompt, in which a mark after a backslash is text.

        `begin`: the prompt begins here, so that the tokenizer adds its first token.
        """
        # As in transformers: for a text model with a template, only the template writes special tokens.
        begin = begin and (self.prompts.template is None or self.pictures is not None)
        text = without_backslashes(prompt)
        if text == prompt:
            return self.tokenizer.encode(prompt, add_special=begin)
        names, tokenizer = self._renamed
        if names:
            prompt = occurrences(names).sub(lambda match: names[match[0]], prompt)
        return tokenizer.encode(without_backslashes(prompt), add_special=begin)

    @functools.cached_property
    def _renamed(self) -> tuple[dict[str, str], TextTokenizer]:
        """Other names for the tokens that are spelled like a mark, and the tokenizer with these names.

        It tokenises a mark as ordinary text.
        """
        added = {token.content for token in self.tokenizer.tokenizer.get_added_tokens_decoder().values()}
        names = {mark: f"\ue000{kind}\ue001" for kind, mark in MARKS.items() if mark in added}  # private use characters
        return names, self.tokenizer.renamed(names) if names else self.tokenizer

    def batch(self, prompts: Sequence[Int[np.ndarray, " T"]], reads: Sequence[Read] = ()) -> Inputs:
        """`Inputs` from rows of ids, which are padded on the right, and their pictures."""
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
        """The ids of one prompt, in which the token of each picture is repeated once per vision token.

        `reads` are the `pictures`, converted by `Pictures.read`. Raises InputError as `__call__`; also if the numbers
        of image tokens and images differ.
        """
        return self._ids(self.prompts.write(text, *count(pictures)), pictures, reads)

    def _ids(self, prompt: str, pictures: Sequence[Picture | Video], reads: Sequence[Read]) -> Int[np.ndarray, " T"]:
        ids = self.encode(self._spell_out(prompt, pictures, reads))
        if not ids.size:
            raise InputError("the prompt is empty: the tokenizer returns no tokens")
        return self._repeated(ids, pictures, reads)

    def _repeated(
        self, ids: Int[np.ndarray, " _t"], pictures: Sequence[Picture | Video], reads: Sequence[Read]
    ) -> Int[np.ndarray, " T"]:
        """The ids with the token of each picture repeated once per vision token."""
        repeats = np.ones(len(ids), np.int64)
        token_ids = {"image": self.config.image_token, "video": self.config.video_token}
        if token_ids["video"] is None:  # the text of a video contains the image token
            token_ids["video"] = token_ids["image"]
        for kind in MARKS:  # both kinds together if they share a token
            alike = [other for other in MARKS if token_ids[other] == token_ids[kind]]
            of_kind = [read for picture, read in zip(pictures, reads, strict=True) if _kind(picture) in alike]
            # A picture with a text has its token several times in the prompt already, others once.
            numbers = [n for read in of_kind for n in ([read.tokens] if read.text is None else [1] * read.tokens)]
            columns = np.flatnonzero(ids == token_ids[kind])
            # Counts ids, so that text of the user cannot be taken for an image.
            _check_count(kind, len(columns), len(numbers))
            repeats[columns] = numbers
        return np.repeat(ids, repeats)

    def decode(
        self, tokens: Int[np.ndarray | jax.Array, "*B T"], lengths: Lengths = None, *, skip_special_tokens: bool = True
    ) -> str | list[str]:
        """The text of one row [T], or a list with the text of each row [B, T].

        Args:
            tokens: generated ids; a row ends at its first stop token.
            lengths: number of tokens of each row; None for all.
            skip_special_tokens: remove special tokens. False for models that mark up their answers with them.
        """
        return self.tokenizer.decode(tokens, lengths, stop=self.config.stop, skip_special_tokens=skip_special_tokens)

    def pieces(self, tokens: Iterable[Any], *, skip_special_tokens: bool = True) -> Iterator[str]:
        """The text of one row, piece by piece as its tokens come.

            for piece in processor.pieces(vlkv.stream(params, inputs)):
                print(piece, end="", flush=True)

        Args:
            tokens: ids, or arrays of one id as `vlkv.stream` yields them.
            skip_special_tokens: as in `decode`.

        Raises:
            InputError: the tokens are those of several rows, or are not whole numbers.
        """
        ids = map(_one_id, tokens)
        return filter(None, self.tokenizer.increments(ids, stop=self.config.stop, skip=skip_special_tokens))

    def in_order(self, text: str, row: Sequence[Picture | Video]) -> list[Picture | Video]:
        """The pictures of a question in the order of its marks; raises InputError like `PromptWriter.write`."""
        prompt = self.prompts.write(text, *count(row))
        marks = {"image": self.prompts.image_token, "video": self.prompts.video_token}
        if marks["image"] == marks["video"]:  # only the marks distinguish images and videos
            kinds = {mark: kind for kind, mark in MARKS.items()}
            order = [kinds[mark] for mark in occurrences(kinds).findall(text)]
        else:
            kinds = {token: kind for kind, token in marks.items() if token is not None}
            order = [kinds[token] for token in occurrences(kinds).findall(prompt)] if row else []
        queues = {kind: [picture for picture in row if _kind(picture) == kind] for kind in MARKS}
        # `_ids` raises an error if the template repeats or drops a picture.
        shown = [queues[kind].pop(0) for kind in order if queues[kind]]
        return shown + [picture for queue in queues.values() for picture in queue]

    def _spell_out(self, prompt: str, pictures: Sequence[Picture | Video], reads: Sequence[Read]) -> str:
        """The prompt with the token of each picture replaced by `Read.text`, if pictures have such texts."""
        if all(read.text is None for read in reads):
            return prompt
        texts = {}
        for kind, token in (("image", self.prompts.image_token), ("video", self.prompts.video_token)):
            spelled = [read.text for picture, read in zip(pictures, reads, strict=True) if _kind(picture) == kind]
            if token is not None:
                _check_count(kind, len(occurrences([token]).findall(prompt)), len(spelled))
                texts[token] = iter(spelled)
        return occurrences(texts).sub(lambda match: next(texts[match[0]]) or match[0], prompt)

    def _read(self, row: Sequence[Picture | Video]) -> list[Read]:
        if not row:
            return []
        assert self.pictures is not None  # PromptWriter.write raises an error otherwise
        return [self.pictures.read(picture, images=count(row)[0]) for picture in row]


def _spelling(folder: Path, tokenizer: TextTokenizer, token: int | None) -> str | None:
    """The text of a token id of the config, such as that of the image token; None if there is no such token."""
    if token is None:
        return None
    text = tokenizer.tokenizer.id_to_token(token)
    if text is None:
        raise InputError(f"{folder / 'tokenizer.json'}: has no token {token}, which is the image token in "
                         "config.json; the files belong to different checkpoints")  # fmt: skip
    return text


def _one_id(token: Any) -> int:
    number = np.asarray(token)
    if number.size != 1 or not np.issubdtype(number.dtype, np.integer):
        raise InputError(f"pieces are of one row, and this is {number.dtype} {list(number.shape)}: of row i of a "
                         "batch, give (tokens[i] for tokens in vlkv.stream(...))")  # fmt: skip
    return int(number.reshape(()))


def _check_count(kind: str, present: int, needed: int) -> None:
    if present != needed:
        raise InputError(f"the prompt has {present} {kind} token(s), but needs {needed}; mark {kind}s only with "
                         f"{MARKS[kind]}; {literal(MARKS[kind])} is the word itself")  # fmt: skip


def _kind(picture: Picture | Video) -> str:
    return "video" if isinstance(picture, Video) else "image"
