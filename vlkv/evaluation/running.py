"""Asks every question under every policy: each batch is prefilled once, compressed in many ways, and answered.

Policies that reduce the prompt or cap the layers have a prefill of their own. Later turns, and the questions of a
query-agnostic run, go through `vlkv.extend`: the first turn's cache stays as it was compressed.

Axes: B rows of a batch · S tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.buckets import round_up
from vlkv.cache import PackedCache
from vlkv.errors import InputError
from vlkv.evaluation import dialogue
from vlkv.evaluation.batching import Batch, batches
from vlkv.evaluation.journal import Entry, Journal
from vlkv.evaluation.keeps import budget, pool_bytes, share_programs
from vlkv.evaluation.records import Record
from vlkv.evaluation.videos import read_video
from vlkv.extend import extend
from vlkv.families import Model
from vlkv.generate import check_room, decode, log_probabilities
from vlkv.inputs import Inputs
from vlkv.policies.full import Full
from vlkv.policies.policy import Policy
from vlkv.prefill import fill_cache_with, prefill
from vlkv.processing import Processor, Video
from vlkv.reading import read_prompt
from vlkv.sampling import Greedy, Sample

_read_prompt = jax.jit(read_prompt)
_fill_cache = jax.jit(fill_cache_with, static_argnames="new_tokens")
_prefill = jax.jit(prefill, static_argnames="new_tokens")
_extend = jax.jit(extend)
_decode = jax.jit(decode, static_argnames="sampling")
_log_probabilities = jax.jit(log_probabilities)
_PROGRAMS = 120  # compiled decoding loops; each needs many memory maps, of which a process has a limited number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How questions are asked.

    Attributes:
        max_new_tokens: the longest answer; answers are greedy.
        batch: rows that are prefilled together.
        query_agnostic: the policy sees the prompt up to the question only; the question follows through `extend`.
        perplexity: also score the first accepted answer.
        temperature: of two more answers that the full cache draws, to be compared with each other; 0: none.
        frames: the most frames of a video.
        seed: of policies and answers that are drawn at random.
    """

    max_new_tokens: int = 64
    batch: int = 1
    query_agnostic: bool = False
    perplexity: bool = False
    temperature: float = 0.0
    frames: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("batch", 1), ("temperature", 0), ("frames", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name}={getattr(self, name)} must be at least {least}")


def run(
    params: Model,
    processor: Processor,
    records: Sequence[Record],
    plan: Sequence[Policy],
    settings: Settings,
    journal: Journal,
    *,
    shown: Callable[[Sequence[Batch]], Iterable[Batch]] = iter,
) -> None:
    """Answers the questions that the journal does not hold yet, and appends the answers batch by batch.

    Args:
        params: the model.
        processor: of the same folder.
        records: from `read_records`.
        plan: the policies.
        settings: how to ask.
        journal: of a run with the same records, policies and settings.
        shown: wraps the batches, for a progress bar.

    Raises:
        InputError: a question or an image cannot be used; the message names the line. Texts are checked before
            anything is compiled.
    """
    asker = _Asker(params, processor, records, settings)
    asker.check()
    shared = (lambda record: dialogue.image_part(processor, record)) if settings.query_agnostic else None
    for batch in shown(batches(records, settings.batch, shared)):
        todo = [i for i in range(len(plan)) if not _held(journal, batch, records, i)]
        if todo:
            inputs, room = asker.begin(batch)
            for i, size, cache, logits in _compressed(params, inputs, plan, todo, room, settings.seed, batch.number):
                drawn = settings.temperature if type(plan[i]) is Full else 0.0
                journal.append(asker.ask(batch, i, size, cache, logits, drawn))
                del cache, logits  # before the next one is made


def _compressed(
    params: Model, inputs: Inputs, plan: Sequence[Policy], todo: Sequence[int], room: int, seed: int, batch: int
) -> Iterator[tuple[int, int, PackedCache, Array]]:
    """The cache and logits of a batch under each policy in `todo`, and the bytes that its cache takes by itself.

    All keeps of a method run in one program, with the memory of the largest.
    """
    key = jax.random.split(jax.random.fold_in(jax.random.key(seed), batch))[0]
    # A shared prefill holds the queries of all layers, which is not worth it for a single policy.
    whole = [i for i, policy in enumerate(plan) if policy.reducer is None and policy.cap is None]
    prompt = _read_prompt(params, inputs) if len(whole) > 1 and set(whole) & set(todo) else None
    programs = share_programs(plan)
    layers, length = params.config.decoder.layers, inputs.valid.shape[1]
    for i in todo:
        policy, program = plan[i], programs[i]
        if i in whole and prompt is not None:
            table = budget(policy, program, layers=layers, length=length)
            cache, logits = _fill_cache(prompt, program, table, new_tokens=room, key=key), prompt.logits
        else:
            cache, logits = _prefill(params, inputs, policy, new_tokens=room, key=key)
        size = cache.bytes
        if program is not policy and prompt is not None:
            number = cache.tail_k[0].dtype.itemsize
            saved = [pool_bytes(p, params.config, inputs, number=number) for p in (program, policy)]
            size -= len(inputs.valid) * (saved[0] - saved[1])
        yield i, size, cache, logits


def _held(journal: Journal, batch: Batch, records: Sequence[Record], policy: int) -> bool:
    return all((row, turn, policy) in journal.entries for row in batch.rows for turn in range(len(records[row].turns)))


class _Asker:
    """Asks the rows of a batch, turn after turn."""

    def __init__(self, params: Model, processor: Processor, records: Sequence[Record], settings: Settings) -> None:
        self.params, self.processor, self.records, self.settings = params, processor, records, settings
        self.sampling = Greedy(max_new_tokens=settings.max_new_tokens)
        self.compiled: set[Any] = set()

    def check(self) -> None:
        """Raises InputError for what is wrong with a text."""
        for record in self.records:
            try:
                self._check(record)
            except InputError as error:
                raise InputError(f"line {record.line}: {error}") from None

    def _check(self, record: Record) -> None:
        answers: list[str] = []
        if self.settings.query_agnostic:
            if not (record.images or record.videos):
                raise InputError("no image: a query-agnostic run compresses what stands before the question")
            self.processor.beyond(self._begin_text(record), dialogue.prompt(self.processor, record, answers))
        for turn in record.turns:
            dialogue.prompt(self.processor, record, answers)
            if self.settings.perplexity:
                count = len(dialogue.reference(self.processor, record, answers))
                if count > self.settings.max_new_tokens:
                    raise InputError(
                        f"the first answer has {count} tokens, more than --max-new-tokens "
                        f"{self.settings.max_new_tokens}: raise that, or leave out the metric perplexity"
                    )
            answers.append(next(iter(turn.answers), "x"))

    def begin(self, batch: Batch) -> tuple[Inputs, int]:
        """The inputs of the first prefill, and the number of tokens that may follow."""
        records = [self.records[group[0]] for group in batch.groups]
        whole = not self.settings.query_agnostic
        texts = [record.turns[0].question for record in records]
        try:
            inputs = self.processor([self._media(record) for record in records], texts, question=whole)
            room = self.settings.max_new_tokens + round_up(max(map(self._later, batch.rows)), self.buckets)
            check_room(self.params.config, inputs, room)
            return inputs, room
        except InputError as error:
            lines = ", ".join(str(record.line) for record in records[: batch.real])
            raise InputError(f"line {lines}: {error}") from None

    def _media(self, record: Record) -> list[Path | Video]:
        """The images, then the videos."""
        return [*record.images, *(read_video(video, self.settings.frames) for video in record.videos)]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Buckets for the length of later tokens, including 0."""
        return (0, *self.processor.buckets.text)

    def _later(self, row: int) -> int:
        """Tokens that follow the first prompt of a row, before its last answer."""
        record = self.records[row]
        asked = dialogue.later_tokens(self.processor, record, self._begin_text(record))
        return asked + (len(record.turns) - 1) * self.settings.max_new_tokens

    def _begin_text(self, record: Record) -> str:
        if self.settings.query_agnostic:
            return dialogue.image_part(self.processor, record)
        return dialogue.prompt(self.processor, record, [])

    def ask(
        self,
        batch: Batch,
        policy: int,
        size: int,
        cache: PackedCache,
        logits: Float[Array, "B vocab"],
        temperature: float,
    ) -> list[Entry]:
        """The answers to every row of the batch from a cache of its groups; with a temperature two more are drawn."""
        entries: list[Entry] = []
        key = jax.random.fold_in(jax.random.key(self.settings.seed), batch.number)
        for number in range(max(map(len, batch.groups))):
            rows = [group[min(number, len(group) - 1)] for group in batch.groups]
            new = [i for i, group in enumerate(batch.groups[: batch.real]) if number < len(group)]
            draw = functools.partial(self._draw, temperature, jax.random.fold_in(key, number))
            entries += self._converse(rows, new, policy, size, cache, logits, draw)
        return entries

    def _converse(
        self,
        rows: list[int],
        new: list[int],
        policy: int,
        size: int,
        cache: PackedCache,
        logits: Float[Array, "B vocab"],
        draw: Callable[[int, PackedCache, Array], list[list[str]]],
    ) -> list[Entry]:
        records = [self.records[row] for row in rows]
        said: list[list[str]] = [[] for _ in rows]
        before = [self._begin_text(record) for record in records]
        used, entries = np.zeros(len(rows), int), []
        for turn in range(len(records[0].turns)):
            after = [dialogue.prompt(self.processor, *pair) for pair in zip(records, said, strict=True)]
            if after != before:
                fed = self.processor.extension(before, after)
                used += fed.valid.sum(axis=1)
                self._require(cache, used, records)
                cache, logits = _extend(self.params, cache, fed)
            tokens, lengths, seconds = self._decode(cache, logits)
            answers = self.processor.decode(tokens, lengths)
            references, scores = self._score(records, said, cache, logits)
            drawn = draw(turn, cache, logits)
            entries += [
                Entry(
                    row=rows[i], turn=turn, policy=policy, answer=answers[i], tokens=int(lengths[i]),
                    seconds=seconds / len(rows), bytes=size // len(rows), log_probability=float(scores[i]),
                    reference=int(references[i]), drawn=[texts[i] for texts in drawn],
                )
                for i in new
            ]  # fmt: skip
            said = [
                [*earlier, dialogue.clipped(self.processor, answer, self.settings.max_new_tokens)]
                for earlier, answer in zip(said, answers, strict=True)
            ]
            before = after
        return entries

    def _decode(
        self, cache: PackedCache, logits: Float[Array, "B vocab"]
    ) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, " B"], float]:
        """Answers, and the seconds that they took without compilation: what is compiled is run once before."""
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves((cache, logits)))
        known = jax.tree.structure(cache), shapes
        if known not in self.compiled and len(self.compiled) == _PROGRAMS:
            jax.clear_caches()
            self.compiled.clear()
        for _ in range(1 if known in self.compiled else 2):
            begin = time.perf_counter()
            made = jax.block_until_ready(_decode(self.params, cache, logits, sampling=self.sampling))
            seconds = time.perf_counter() - begin
        self.compiled.add(known)
        tokens, lengths = (np.asarray(x) for x in made)
        return tokens, lengths, seconds

    def _draw(
        self, temperature: float, key: jax.Array, turn: int, cache: PackedCache, logits: Float[Array, "B vocab"]
    ) -> list[list[str]]:
        """Two answers of every row at a temperature; none at temperature 0."""
        if not temperature:
            return []
        sampling = Sample(max_new_tokens=self.settings.max_new_tokens, temperature=temperature)
        keys = jax.random.split(jax.random.fold_in(key, turn))
        made = [_decode(self.params, cache, logits, sampling=sampling, key=each) for each in keys]
        return [self.processor.decode(*map(np.asarray, each)) for each in made]

    def _score(
        self, records: Sequence[Record], said: Sequence[list[str]], cache: PackedCache, logits: Float[Array, "B vocab"]
    ) -> tuple[Int[np.ndarray, " B"], Float[np.ndarray, " B"]]:
        """Tokens of each first accepted answer, and its log-probability."""
        if not self.settings.perplexity:
            return np.zeros(len(records), int), np.zeros(len(records))
        ids = [dialogue.reference(self.processor, *pair) for pair in zip(records, said, strict=True)]
        lengths = np.array([len(row) for row in ids])
        width = min(round_up(int(lengths.max()), self.processor.buckets.text), self.settings.max_new_tokens)
        targets = np.array([[*row, *[-1] * (width - len(row))] for row in ids], np.int32)
        return lengths, np.asarray(_log_probabilities(self.params, cache, logits, targets)).sum(axis=1)

    def _require(self, cache: PackedCache, used: Int[np.ndarray, " B"], records: Sequence[Record]) -> None:
        """Raises InputError where earlier answers have become longer than there is room for."""
        worst = int(used.argmax())
        if used[worst] + self.settings.max_new_tokens > cache.new_tokens:
            raise InputError(f"line {records[worst].line}: its answers do not fit: raise --max-new-tokens")
