"""Converts text to token ids and back with the checkpoint's `tokenizer.json`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
import tokenizers
from jaxtyping import Int

from checkpoints_convert.tokenizer_classes import read_tokenizer, special_names, special_settings
from vlkv.errors import InputError
from vlkv.files import one_line

# Number of tokens of each row; None for all.
Lengths: TypeAlias = Int[np.ndarray | jax.Array, "*B"] | Sequence[int] | int | np.integer | None

_OTHER_FORMS = ("tokenizer.model", "*.tiktoken", "vocab.json")  # sentencepiece; tiktoken; vocabulary and merges


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer and its special tokens (bos_token -> "<s>" and so on), which chat templates use."""

    tokenizer: tokenizers.Tokenizer
    special: Mapping[str, str]

    @classmethod
    def from_folder(cls, folder: Path) -> TextTokenizer:
        """Reads `tokenizer.json`, and tokens and settings from the files beside it; InputError if one is damaged."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            other = next((file.name for form in _OTHER_FORMS for file in folder.glob(form)), None)
            if other is not None:
                raise InputError(f"{path}: no such file, only {other}: `vlkv convert` converts it")
            raise InputError(
                f"{path}: no such file, so the folder has no tokenizer; copy it from the checkpoint's source, or use "
                "vlkv.load_params, which does not need it"
            )
        try:
            tokenizer = read_tokenizer(folder)
        except InputError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise InputError(
                f"{path}: not a valid tokenizer ({one_line(error)}); copy it again from its source"
            ) from None
        # The file may contain settings for truncation and padding of training data.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer=tokenizer, special=special_names(special_settings(folder)))

    def add(self, text: str) -> int:
        """Adds a special token if the tokenizer does not have it, and returns its id."""
        self.tokenizer.add_special_tokens([text])
        return self.tokenizer.encode(text, add_special_tokens=False).ids[0]

    def renamed(self, names: Mapping[str, str]) -> TextTokenizer:
        """The same tokenizer with other texts for some added tokens (old text -> new text), which keep their ids."""
        raw = json.loads(self.tokenizer.to_str())
        for token in raw["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, dict):
            raw["model"]["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
        else:  # Unigram: pairs of a text and its score
            raw["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(raw))
        tokenizer.encode_special_tokens = self.tokenizer.encode_special_tokens
        return dataclasses.replace(self, tokenizer=tokenizer)

    def encode(self, text: str, *, add_special: bool = True) -> Int[np.ndarray, " T"]:
        """Token ids of a text that may contain the text of special tokens, as chat templates do.

        `add_special`: add the tokens of the file's post-processor (usually the BOS token), unless the text starts with
        it. Raises InputError if the text contains half of a surrogate pair.
        """
        lone = re.search("[\ud800-\udfff]", text)
        if lone:
            raise InputError(f"the text has the lone surrogate {lone[0]!r} at character {lone.start()}: remove it, or "
                             "write the whole character")  # fmt: skip
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if add_special:
            full = self.tokenizer.encode(text).ids
            if full[:2] != ids[:1] * 2:  # otherwise the template has already added the first token
                ids = full
        return np.asarray(ids, np.int32)

    def decode(
        self,
        tokens: Int[np.ndarray | jax.Array, "*B T"],
        lengths: Lengths = None,
        *,
        stop: tuple[int, ...] = (),
        skip_special_tokens: bool = True,
    ) -> str | list[str]:
        """Text of one row [T], or a list of texts of a batch [B, T]; as `Processor.decode`. `stop`: ids that end a row.

        Raises InputError for tokens that are not integers, not one row or a batch, and for a negative id.
        """
        ids = np.asarray(tokens)
        if ids.ndim not in (1, 2) or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
            raise InputError(f"tokens must be integers [T] or [B, T], not {ids.dtype} {list(ids.shape)}")
        counts = np.asarray(ids.shape[-1] if lengths is None else lengths)
        if lengths is not None and counts.shape != ids.shape[:-1]:
            raise InputError(
                f"lengths have shape {list(counts.shape)}, tokens {list(ids.shape)}: give one length per row"
            )
        rows = np.atleast_2d(ids)
        counts = np.broadcast_to(counts, rows.shape[:1])
        texts = [
            self._decode_row([int(token) for token in row[: max(int(count), 0)]], stop, skip_special_tokens)
            for row, count in zip(rows, counts, strict=True)
        ]
        return texts[0] if ids.ndim == 1 else texts

    def increments(self, tokens: Iterable[int], *, stop: tuple[int, ...] = (), skip: bool = True) -> Iterator[str]:
        """The text that each token of a row adds to the text before it, and at the end that of an incomplete character.

        A token adds "" if it completes no character. Then the token that completes it adds the whole character. `stop`:
        ids that end the row; `skip`: leave out special tokens.
        """
        # The text of a token depends on the token before it, but not on earlier ones, so only the last are decoded.
        # `before` is the text of the first `known` tokens in `recent`, which has been yielded.
        recent: list[int] = []
        known, before, text = 0, "", ""
        for token in tokens:
            recent.append(token)
            text = self._decode_row(recent, stop, skip)
            if len(text) > len(before) and not text.endswith("\ufffd"):  # an incomplete UTF-8 character
                yield text[len(before) :]
                recent, known = recent[known:], len(recent) - known
                before = text = self._decode_row(recent, stop, skip)
            else:
                yield ""
        yield text[len(before) :]

    def _decode_row(self, row: list[int], stop: tuple[int, ...], skip_special_tokens: bool) -> str:
        row = row[: next((i for i, token in enumerate(row) if token in stop), len(row))]
        if any(token < 0 for token in row):
            raise InputError(
                "a token id is negative: give the lengths of padded rows; in an answer, -1 means that logits are NaN: "
                "vlkv.generate outside jax.jit says why"
            )
        return self.tokenizer.decode(row, skip_special_tokens=skip_special_tokens)
