"""Answers questions and scores continuations in batches of few shapes. Does not depend on an evaluation harness.

Axes: B questions of a batch · R continuations of a batch · S new tokens.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vlkv.buckets import round_up
from vlkv.cache.pool import take_rows
from vlkv.compression.policy import Policy
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generation.decode import check_room, decode
from vlkv.generation.generate import generate
from vlkv.generation.nan import check_values
from vlkv.generation.prefill import prefill
from vlkv.generation.rules import LogitRules
from vlkv.generation.sampling import Greedy, Sample
from vlkv.generation.score import log_probabilities
from vlkv.inputs import Inputs
from vlkv.processing import Processor
from vlkv.processing.prompts import literal

_ONE = ("num_beams", "num_return_sequences", "n", "best_of", "repetition_penalty", "length_penalty")
_LENGTHS = tuple(8 * 2**i for i in range(12))  # continuations are padded to one of these lengths


class Question(NamedTuple):
    """A prompt: text, with or without image marks, and pictures and videos."""

    text: str
    pictures: Sequence[Any] | Callable[[], Sequence[Any]] = ()  # or a function that loads them


class Answer(NamedTuple):
    """The answer to one question."""

    text: str
    prompt_tokens: int
    tokens: int
    cache_bytes: float  # allocated bytes of the batch's cache, divided by its rows


class Likelihood(NamedTuple):
    """The likelihood of one continuation."""

    log_probability: float  # sum over its tokens
    tokens: int
    greedy: bool  # whether greedy decoding gives the same tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers questions with a model and a policy. The last batch is padded, so that no other shape is compiled."""

    params: Model
    processor: Processor
    policy: Policy
    batch_size: int = 1  # questions per batch
    seed: int = 0  # for sampling and random policies; the same for every batch
    done: Callable[[int], Any] = lambda count: None  # called after each batch with the number of its questions

    def answers(self, questions: Sequence[Question], sampling: Greedy, until: Sequence[str] = ()) -> list[Answer]:
        """Answers each question. An answer ends before the first of the texts `until`.

        It has at most `sampling.max_new_tokens` tokens, and no more than the model has positions for.

        Raises:
            InputError: the processor refuses a question, or logits are NaN.
        """
        results: dict[int, Answer] = {}
        for indices, inputs in self._batches(questions):
            limit = self.processor.config.decoder.max_positions
            room = limit - inputs.max_vision - inputs.max_text  # rounded bounds, so that few sizes are compiled
            if room < sampling.max_new_tokens:
                room = limit - int(inputs.valid.sum(axis=1).max())
            fitting = dataclasses.replace(sampling, max_new_tokens=max(1, min(sampling.max_new_tokens, room)))
            check_room(self.processor.config, inputs, fitting.max_new_tokens)
            output = generate(self.params, inputs, policy=self.policy, sampling=fitting, key=jax.random.key(self.seed))
            texts = self.processor.decode(output.tokens, output.lengths)
            prompts, lengths = inputs.valid.sum(axis=1), np.asarray(output.lengths)
            for row, i in enumerate(indices):
                text = min((texts[row].split(end)[0] for end in until if end), key=len, default=texts[row])
                results[i] = Answer(text, int(prompts[row]), int(lengths[row]), output.cache_bytes / self.batch_size)
            self.done(len(indices))
        return [results[i] for i in range(len(questions))]

    def likelihoods(
        self, questions: Sequence[Question], continuations: Sequence[Sequence[str]]
    ) -> list[list[Likelihood]]:
        """The likelihood of each continuation of each question, as in `vlkv.score`. A question is prefilled only once.

        Spaces at both ends of a continuation are removed, because the space before an answer belongs to the prompt.

        Raises:
            InputError: the processor refuses a question, a continuation is empty, or logits are NaN.
        """
        results: dict[int, list[Likelihood]] = {}
        for indices, inputs in self._batches(questions):
            pairs = [(row, self._target(text)) for row, i in enumerate(indices) for text in continuations[i]]
            if not pairs:
                raise InputError("a question has no continuation to score")
            longest = round_up(max(len(target) for _, target in pairs), _LENGTHS)
            check_room(self.processor.config, inputs, longest)
            count = self.batch_size * -(-len(pairs) // self.batch_size)
            rows, targets = np.zeros(count, np.int32), np.full((count, longest), -1, np.int32)
            for pair, (row, target) in enumerate(pairs):
                rows[pair], targets[pair, : len(target)] = row, target
            key = jax.random.key(self.seed)
            scores, greedy = map(np.asarray, _score(self.params, inputs, rows, targets, policy=self.policy, key=key))
            row_scores = np.zeros(self.batch_size)
            np.add.at(row_scores, rows, scores.sum(axis=1))
            check_values(self.params, inputs, row_scores)
            results |= {i: [] for i in indices}
            for (row, target), score, tokens in zip(pairs, scores, greedy, strict=False):
                same = bool((tokens[: len(target)] == target).all())
                results[indices[row]].append(Likelihood(float(score.sum()), len(target), same))
            self.done(len(indices))
        return [results[i] for i in range(len(questions))]

    def _batches(self, questions: Sequence[Question]) -> Iterator[tuple[list[int], Inputs]]:
        """Indices of questions of similar length, and their inputs, padded with the last question."""
        order = sorted(range(len(questions)), key=lambda i: len(questions[i].text))
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            batch = [questions[i] for i in indices]
            batch += batch[-1:] * (self.batch_size - len(batch))
            pictures = [list(item.pictures() if callable(item.pictures) else item.pictures) for item in batch]
            yield indices, self.processor(pictures, [item.text for item in batch])

    def _target(self, text: str) -> Int[np.ndarray, " S"]:
        tokens = self.processor.encode(literal(text.strip()), begin=False)
        if not tokens.size:
            raise InputError(f"the continuation {text!r} is empty: there is nothing to score")
        return tokens


@partial(jax.jit, static_argnames="policy")
def _score(
    params: Model,
    inputs: Inputs,
    rows: Int[Array, " R"],
    targets: Int[Array, "R S"],
    *,
    policy: Policy,
    key: Key[Array, ""],
) -> tuple[Float[Array, "R S"], Int[Array, "R S"]]:
    """Log-probabilities of each target after the prompt `rows[r]`, and the greedy tokens after the same prompt."""
    key = jax.random.split(key)[0]  # the same key as in `generate` and `score`
    cache, logits = prefill(params, inputs, policy, new_tokens=targets.shape[1], key=key)
    cache, logits = take_rows(cache, rows), jnp.take(logits, rows, axis=0)
    plain = Greedy(max_new_tokens=targets.shape[1], stop=(), rules=LogitRules())
    greedy, _ = decode(params, cache, logits, sampling=plain)
    return log_probabilities(params, cache, logits, targets), greedy


def sampling_from(
    options: Mapping[str, Any], *, layout: str = "checkpoint", most: int | None = None
) -> tuple[Greedy, tuple[str, ...]]:
    """The sampling and the texts that end an answer, from the generation options of a request (those of transformers).

    An option `image_aspect_ratio` must ask for the layout of the processor; `most` limits `max_new_tokens`. Raises
    InputError for an option that is not supported.
    """
    options = {name: value for name, value in options.items() if value is not None}
    tokens = int(options.pop("max_new_tokens", options.pop("max_gen_toks", 1024)))
    until = options.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    temperature = float(options.pop("temperature", 1.0 if options.get("do_sample") else 0.0))
    draw = bool(options.pop("do_sample", temperature > 0)) and temperature > 0
    top_p, top_k = float(options.pop("top_p", 1.0)), int(options.pop("top_k", 0))
    aspect = options.pop("image_aspect_ratio", None)
    if {"original": "checkpoint", "pad": "pad", None: layout}.get(aspect) != layout:
        raise InputError(
            f"generation option image_aspect_ratio={aspect!r}, but layout={layout!r}: set layout= to match"
        )
    neutral = {"use_cache": True} | dict.fromkeys(_ONE, 1)
    for name, value in options.items():
        if name not in neutral or value != neutral[name]:
            raise InputError(
                f"generation option {name}={value!r} is not supported; use max_new_tokens, until, do_sample, "
                "temperature, top_p and top_k"
            )
    tokens = tokens if most is None else min(tokens, most)
    if not draw:
        return Greedy(max_new_tokens=tokens), until
    return Sample(max_new_tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k or None), until
