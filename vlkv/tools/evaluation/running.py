"""Answers every question under every policy. Each batch is prefilled once and compressed with each policy.

Later turns, and the questions of a query-agnostic run, are added with `vlkv.extend`, which does not compress the cache
of the first prompt again.

Axes: B rows of a batch · S tokens.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vlkv.buckets import merged, round_up
from vlkv.cache.pool import PackedCache
from vlkv.compression.checking import require_fit
from vlkv.compression.policy import Policy
from vlkv.compression.slots import slots_of
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation import jitted
from vlkv.generation.begin import Begun
from vlkv.generation.decode import check_room
from vlkv.generation.nan import check_tokens, check_values
from vlkv.generation.sampling import Greedy, Sample
from vlkv.generation.score import log_probabilities, score
from vlkv.inputs import Inputs
from vlkv.policies import Full, text_of
from vlkv.processing import Processor
from vlkv.tools.evaluation import dialogue
from vlkv.tools.evaluation.batching import AT_A_TIME, Batch, Compress, Work, batches, compiling, compressed
from vlkv.tools.evaluation.journal import Entry, Store
from vlkv.tools.evaluation.keeps import groups
from vlkv.tools.evaluation.records import Record, Settings

# What another length costs, in prompts. Compiling the programs of some methods for a small model on a CPU takes as long
# as about 16 prompts; an accelerator is faster, and its compiler is slower.
_PROGRAM = 16
_AT_FIRST = 2  # methods that are compiled before the first one answers: with prefill and decoding, about 4 programs
_log_probabilities = jax.jit(log_probabilities)
_score = jax.jit(score)


def run(
    params: Model,
    processor: Processor,
    records: Sequence[Record],
    plan: Sequence[Policy],
    settings: Settings,
    journal: Store,
    *,
    advance: Callable[..., None] = lambda count=1, text="", left=True: None,
    compress: Compress | None = None,
) -> None:
    """Answers the questions whose answers are not in the journal yet, and appends the answers batch by batch.

    Few programs are compiled at a time, so that the first policies answer before all are compiled. Nothing is compiled
    while a policy answers, which would slow it down. The keys of `journal`, which is of a run with the same records,
    policies and settings, are row, turn and policy. `advance` is that of a `progress_bar` over the missing answers, and
    `compress` makes the caches of a batch; None: `compressed`.

    Raises:
        InputError: a question or an image cannot be used, and the message names the line; or logits are NaN. All texts
            are checked before anything is compiled.
    """
    evaluator = _Evaluator(params, processor, records, plan, settings)
    evaluator.check()
    evaluator.choose_buckets()
    shared = (lambda record: dialogue.before_question(processor, record)) if settings.query_agnostic else None
    turns, before = sum(len(record.turns) for record in records), 0
    for batch in batches(records, settings.batch, shared):
        places = [(row, turn) for row in batch.rows for turn in range(len(records[row].turns))]
        todo = [i for i in range(len(plan)) if not all((*place, i) in journal.entries for place in places)]
        if todo:
            text = f"question {before + 1} of {turns}"
            advance(0, text)
            inputs, new_tokens = evaluator.first_inputs(batch)
            work = Work(params, inputs, batch, new_tokens, evaluator.sampling, settings.seed)
            caches = (compress or compressed)(work, plan, todo)
            for group in groups(plan, todo, _AT_FIRST, AT_A_TIME):
                if compress is None:
                    evaluator.compile(work, group, advance)
                    advance(0, text)
                for i, size, begun in itertools.islice(caches, len(group)):
                    journal.append(evaluator.answer(work, i, size, begun))
                    del begun  # free its memory before the next cache is computed
                    advance(len(places), text)
        before += len(places)


class _Evaluator:
    """Answers the questions of a batch, turn by turn."""

    def __init__(
        self, params: Model, processor: Processor, records: Sequence[Record], plan: Sequence[Policy], settings: Settings
    ) -> None:
        self.params, self.processor, self.records, self.plan, self.settings = params, processor, records, plan, settings
        self.sampling = Greedy(max_new_tokens=settings.max_new_tokens)
        self.compiled: dict[Any, Any] = {}  # as in `compiling`
        self.fed: dict[int, Int[np.ndarray, " T"]] = {}  # ids between the first prefill and the first answer, by row

    def check(self) -> None:
        """Raises InputError if a policy or a text cannot be used."""
        settings, key = self.settings, jax.random.key(self.settings.seed)
        for policy in self.plan:
            require_fit(policy, self.params.decoder.full_layers, key, max_new_tokens=settings.max_new_tokens)
            if slots_of(policy).answer and settings.query_agnostic:
                raise InputError(
                    f"answer={slots_of(policy).answer} observes an answer; a query-agnostic run compresses before the "
                    "question: leave out one"
                )
        for record in self.records:
            try:
                self._check(record)
            except InputError as error:
                raise InputError(f"line {record.line}: {error}") from None

    def choose_buckets(self) -> None:
        """Rounds the lengths of the prompts so that few questions do not compile many programs."""
        write = dialogue.before_question if self.settings.query_agnostic else partial(dialogue.prompt, answers=())
        lengths = [len(self.processor.encode(write(self.processor, record))) for record in self.records]
        buckets = self.processor.buckets
        buckets = dataclasses.replace(buckets, text=merged(buckets.text, lengths, program=_PROGRAM))
        self.processor = dataclasses.replace(self.processor, buckets=buckets)

    def _check(self, record: Record) -> None:
        answers: list[str] = []
        if self.settings.query_agnostic:
            if not (record.context or record.images or record.videos):
                raise InputError("no context and no image: a query-agnostic run compresses what is before the question")
            dialogue.split(self.processor, [record], query_agnostic=True)
        if len(record.turns) > 1:
            if any(slots_of(policy).answer for policy in self.plan):
                raise InputError(
                    "several turns cannot follow a cache that was compressed during the first answer: leave out "
                    "answer=, or give one question per line"
                )
            dialogue.later_tokens(self.processor, record)
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

    def first_inputs(self, batch: Batch) -> tuple[Inputs, int]:
        """The inputs of the first prefill, and the number of tokens that may follow: questions and answers."""
        records = [self.records[group[0]] for group in batch.groups]
        try:
            groups = [[self.records[row] for row in group] for group in batch.groups]
            inputs, fed = dialogue.first_inputs(
                self.processor, groups, query_agnostic=self.settings.query_agnostic, frames=self.settings.frames
            )
            self.fed |= zip(itertools.chain(*batch.groups), itertools.chain(*fed), strict=True)
            buckets = (0, *self.processor.buckets.text)
            new_tokens = self.settings.max_new_tokens + round_up(max(map(self._later_tokens, batch.rows)), buckets)
            check_room(self.params.config, inputs, new_tokens)
            return inputs, new_tokens
        except InputError as error:
            lines = ", ".join(str(record.line) for record in records[: batch.real])
            raise InputError(f"line {lines}: {error}") from None

    def compile(self, work: Work, todo: Sequence[int], advance: Callable[..., None]) -> None:
        """Compiles the programs with which `compressed` makes the caches of `todo`, and those that decode.

        On several devices nothing is compiled here, because shapes do not say how results are divided.
        """
        if len(jax.tree.leaves(self.params)[0].sharding.device_set) > 1:
            return
        with compiling(self.params, self.compiled) as call:
            caches = compressed(work, self.plan, todo, call)
            for i in todo:
                text = f"compiling {i + 1} of {len(self.plan)}: {text_of(self.plan[i], scope=True)}"
                advance(0, text, left=False)
                begun = next(caches)[-1]
                call(jitted.decode, self.params, begun.cache, begun.logits, sampling=self.sampling, begun=begun.tokens)

    def _later_tokens(self, row: int) -> int:
        """Number of slots reserved for a row between its first prefill and its last answer."""
        record = self.records[row]
        answers = (len(record.turns) - 1) * self.settings.max_new_tokens
        return len(self.fed[row]) + dialogue.later_tokens(self.processor, record) + answers

    def answer(self, work: Work, policy: int, size: int, begun: Begun) -> list[Entry]:
        """Answers all rows of a batch from the cache of its groups, which takes `size` bytes."""
        entries: list[Entry] = []
        groups = work.batch.groups
        key = jax.random.fold_in(jax.random.key(self.settings.seed), work.batch.number)
        for number in range(max(map(len, groups))):
            rows = [group[min(number, len(group) - 1)] for group in groups]
            answered = self._converse(rows, work.inputs, policy, size, begun, jax.random.fold_in(key, number))
            new = [i for i, group in enumerate(groups[: work.batch.real]) if number < len(group)]
            entries += [turn[i] for turn in answered for i in new]
        return entries

    def _converse(
        self, rows: list[int], inputs: Inputs, policy: int, size: int, begun: Begun, key: Key[Array, ""]
    ) -> list[list[Entry]]:
        """The answers of each turn to one row of each group."""
        cache, logits, first = begun.cache, begun.logits, begun.tokens
        late = slots_of(self.plan[policy]).answer
        draws = self.settings.temperature > 0 and self.plan[policy] == Full()
        records = [self.records[row] for row in rows]
        history: list[list[str]] = [[] for _ in rows]  # earlier answers of each row
        before: list[str] = []
        used, turns = np.zeros(len(rows), int), []
        for turn in range(len(records[0].turns)):
            after = [dialogue.prompt(self.processor, *pair) for pair in zip(records, history, strict=True)]
            if turn or self.settings.query_agnostic:
                fed = [self.fed[row] for row in rows]
                extension = self.processor.extension(before, after) if turn else self.processor.batch(fed)
                used += extension.valid.sum(axis=1)
                self._check_capacity(cache, used, records)
                cache, logits = jitted.extend(self.params, cache, extension)
            tokens, lengths, seconds = self._decode(cache, logits, first)
            check_tokens(self.params, inputs, tokens)
            answers = self.processor.decode(tokens, lengths)
            references, targets = self._references(records, history, late)
            scores = self._score(targets, inputs, self.plan[policy], cache, logits, key)
            check_values(self.params, inputs, scores)
            drawn = self._draw(cache, logits, jax.random.fold_in(key, turn)) if draws else []
            turns.append(
                [
                    Entry(
                        row=row,
                        turn=turn,
                        policy=policy,
                        answer=answers[i],
                        tokens=int(lengths[i]),
                        ids=tokens[i, : lengths[i]].tolist(),
                        seconds=seconds / len(rows),
                        bytes=size // len(rows),
                        begun=min(int(lengths[i]), late),
                        bytes_before=(begun.bytes_before or 0) // len(rows),
                        log_probability=float(scores[i]),
                        reference=int(references[i]),
                        drawn=[texts[i] for texts in drawn],
                    )
                    for i, row in enumerate(rows)
                ]
            )
            for earlier, answer in zip(history, answers, strict=True):
                earlier.append(dialogue.truncate(self.processor, answer, self.settings.max_new_tokens))
            before = after
        return turns

    def _decode(
        self, cache: PackedCache, logits: Float[Array, "B vocab"], begun: Int[Array, "B m"] | None = None
    ) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, " B"], float]:
        """Tokens and lengths of the answers, and the seconds of decoding what follows the tokens `begun`."""
        program = partial(jitted.decode, self.params, cache, sampling=self.sampling, begun=begun)
        count = jitted.decode._cache_size  # type: ignore[attr-defined]  # number of loaded programs
        loaded = count()
        dry = program(jnp.full_like(logits, jnp.inf))  # loads the program without a step: all rows end at once
        if count() != loaded:
            dry = program(logits)  # on a CPU the first step of a small model takes as long as ten others
        jax.block_until_ready((logits, dry))  # jax only starts a computation when it is called
        begin = time.perf_counter()
        tokens, lengths = jax.block_until_ready(program(logits))
        return np.asarray(tokens), np.asarray(lengths), time.perf_counter() - begin

    def _draw(self, cache: PackedCache, logits: Float[Array, "B vocab"], key: Key[Array, ""]) -> list[list[str]]:
        sampling = Sample(max_new_tokens=self.settings.max_new_tokens, temperature=self.settings.temperature)
        results = [jitted.decode(self.params, cache, logits, sampling=sampling, key=k) for k in jax.random.split(key)]
        return [self.processor.decode(*map(np.asarray, result)) for result in results]

    def _references(
        self, records: list[Record], history: list[list[str]], late: int
    ) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, "B S"]]:
        """Number of tokens of each reference, and the tokens, padded with -1; none if they are not requested."""
        if not self.settings.perplexity:
            return np.zeros(len(records), int), np.zeros((len(records), 0), np.int32)
        ids = [dialogue.reference(self.processor, *pair) for pair in zip(records, history, strict=True)]
        lengths = np.array([len(row) for row in ids])
        width = min(round_up(int(lengths.max()), self.processor.buckets.text), self.settings.max_new_tokens)
        width = max(width, late + 2)  # a policy that compresses after `late` tokens needs two more
        return lengths, np.array([[*row, *[-1] * (width - len(row))] for row in ids], np.int32)

    def _score(
        self,
        targets: Int[np.ndarray, "B S"],
        inputs: Inputs,
        policy: Policy,
        cache: PackedCache,
        logits: Float[Array, "B vocab"],
        key: Key[Array, ""],
    ) -> Float[np.ndarray, " B"]:
        """Log-probability of each reference; 0 for one without tokens."""
        if not targets.size:
            return np.zeros(len(targets))
        if slots_of(policy).answer:  # the references observe, not the answers in the cache
            return np.asarray(_score(self.params, inputs, targets, policy, key=key)).sum(axis=1)
        return np.asarray(_log_probabilities(self.params, cache, logits, targets)).sum(axis=1)

    def _check_capacity(self, cache: PackedCache, used: Int[np.ndarray, " B"], records: Sequence[Record]) -> None:
        """Raises InputError if earlier answers are so long that the next answer may not fit into the cache."""
        worst = int(used.argmax())
        if used[worst] + self.settings.max_new_tokens > cache.new_tokens:
            raise InputError(f"line {records[worst].line}: its answers do not fit: raise --max-new-tokens")
