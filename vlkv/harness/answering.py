"""Questions answered and continuations scored in batches of few shapes; knows of no harness.

Axes: B questions of a batch · R continuations of a batch · S new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vlkv.buckets import round_up
from vlkv.cache import take_rows
from vlkv.errors import InputError
from vlkv.families import Model
from vlkv.generate import check_room, decode, generate, log_probabilities
from vlkv.inputs import Inputs
from vlkv.policies.policy import Policy
from vlkv.prefill import prefill
from vlkv.processing import Processor
from vlkv.sampling import Greedy, Sample

_TARGETS = tuple(8 * 2**i for i in range(12))  # lengths that continuations are padded to


class Question(NamedTuple):
    """A prompt: text, marked or not, and its pictures and videos, or a function that opens them when they are due."""

    text: str
    pictures: Sequence[Any] | Callable[[], Sequence[Any]] = ()


class Answer(NamedTuple):
    """What came of a question."""

    text: str
    prompt_tokens: int
    tokens: int
    cache_bytes: float  # its share of the batch's


class Likelihood(NamedTuple):
    """Of one continuation."""

    log_probability: float  # of all its tokens together
    tokens: int
    greedy: bool  # whether every token was the likeliest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answerer:
    """A model with the policy under test.

    Attributes:
        params: the model.
        processor: its processor.
        policy: what is under test.
        batch_size: questions of a batch; the last batch is filled up, so that it compiles to nothing new.
        seed: of sampling and of random policies, the same for every batch.
        done: told of every batch that is finished how many questions it had.
    """

    params: Model
    processor: Processor
    policy: Policy
    batch_size: int = 1
    seed: int = 0
    done: Callable[[int], Any] = lambda count: None

    def answers(self, questions: Sequence[Question], sampling: Greedy, until: Sequence[str] = ()) -> list[Answer]:
        """An answer to each question, cut before the first of the texts `until`.

        `sampling.max_new_tokens` is what an answer may have at most; a model without room for so many gives fewer.

        Raises:
            InputError: a question that the processor refuses.
        """
        found: dict[int, Answer] = {}
        for places, batch in self._batches(questions):
            inputs = self._inputs(batch)
            most = self.processor.config.decoder.max_positions - inputs.max_vision - inputs.max_text
            fitting = dataclasses.replace(sampling, max_new_tokens=max(1, min(sampling.max_new_tokens, most)))
            check_room(self.processor.config, inputs, fitting.max_new_tokens)
            output = generate(self.params, inputs, policy=self.policy, sampling=fitting, key=jax.random.key(self.seed))
            texts = self.processor.decode(output.tokens, output.lengths)
            prompts, lengths = inputs.valid.sum(axis=1), np.asarray(output.lengths)
            for row, place in enumerate(places):
                text = min((texts[row].split(end)[0] for end in until if end), key=len, default=texts[row])
                share = output.cache_bytes / len(batch)
                found[place] = Answer(text, int(prompts[row]), int(lengths[row]), share)
            self.done(len(places))
        return [found[place] for place in range(len(questions))]

    def likelihoods(
        self, questions: Sequence[Question], continuations: Sequence[Sequence[str]]
    ) -> list[list[Likelihood]]:
        """How likely each continuation of each question is, as `vlkv.score` has it; a question is read but once.

        A continuation starts where an answer does: the space before it, if any, belongs to the prompt.

        Raises:
            InputError: a question that the processor refuses, or an empty continuation.
        """
        found: dict[int, list[Likelihood]] = {}
        for places, batch in self._batches(questions):
            inputs = self._inputs(batch)
            pairs = [(row, self._target(text)) for row, place in enumerate(places) for text in continuations[place]]
            if not pairs:
                raise InputError("a question has no continuation to score")
            longest = round_up(max(len(target) for _, target in pairs), _TARGETS)
            check_room(self.processor.config, inputs, longest)
            count = self.batch_size * -(-len(pairs) // self.batch_size)
            rows, targets = np.zeros(count, np.int32), np.full((count, longest), -1, np.int32)
            for i, (row, target) in enumerate(pairs):
                rows[i], targets[i, : len(target)] = row, target
            key = jax.random.key(self.seed)
            scores, greedy = map(np.asarray, _score(self.params, inputs, rows, targets, policy=self.policy, key=key))
            made = iter(
                Likelihood(float(scores[i].sum()), len(target), bool((greedy[i, : len(target)] == target).all()))
                for i, (_, target) in enumerate(pairs)
            )
            found |= {place: [next(made) for _ in continuations[place]] for place in places}
            self.done(len(places))
        return [found[place] for place in range(len(questions))]

    def _batches(self, questions: Sequence[Question]) -> Iterator[tuple[list[int], list[Question]]]:
        """Batches of like questions: which they are, and they themselves, filled up with the last one."""
        order = sorted(range(len(questions)), key=lambda i: len(questions[i].text))
        for first in range(0, len(order), self.batch_size):
            places = order[first : first + self.batch_size]
            batch = [questions[i] for i in places]
            yield places, batch + batch[-1:] * (self.batch_size - len(batch))

    def _inputs(self, batch: list[Question]) -> Inputs:
        pictures = [list(one.pictures() if callable(one.pictures) else one.pictures) for one in batch]
        return self.processor(pictures, [one.text for one in batch])

    def _target(self, text: str) -> Int[np.ndarray, " S"]:
        tokens = self.processor.tokenizer.encode(text.strip(), add_special=False)
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
    """Log-probabilities of each target after the prompt of its row, and what greedy decoding says there."""
    key = jax.random.split(key)[0]  # as in `generate` and `score`
    cache, logits = prefill(params, inputs, policy, new_tokens=targets.shape[1], key=key)
    cache, logits = take_rows(cache, rows), jnp.take(logits, rows, axis=0)
    greedy, _ = decode(params, cache, logits, sampling=Greedy(max_new_tokens=targets.shape[1], stop=()))
    return log_probabilities(params, cache, logits, targets), greedy


def sampling_from(
    options: Mapping[str, Any], *, layout: str = "checkpoint", most: int | None = None
) -> tuple[Greedy, tuple[str, ...]]:
    """How to generate, from a harness' generation options (those of transformers), and the texts that end an answer.

    Args:
        options: of one request.
        layout: the processor's; it must be what `image_aspect_ratio` asks for, if that is there.
        most: bound on `max_new_tokens`.

    Raises:
        InputError: an option that is not honoured.
    """
    options = {name: value for name, value in options.items() if value is not None}
    tokens = int(options.pop("max_new_tokens", options.pop("max_gen_toks", 1024)))
    until = options.pop("until", ())
    until = (until,) if isinstance(until, str) else tuple(until)
    temperature = float(options.pop("temperature", 1.0 if options.get("do_sample") else 0.0))
    draw = bool(options.pop("do_sample", temperature > 0)) and temperature > 0
    top_p, top_k = float(options.pop("top_p", 1.0)), int(options.pop("top_k", 0))
    wanted = {"original": "checkpoint", "pad": "pad", None: layout}.get(
        aspect := options.pop("image_aspect_ratio", None)
    )
    if wanted != layout:
        raise InputError(
            f"generation option image_aspect_ratio={aspect!r}, but layout={layout!r}: set layout= to match"
        )
    neutral = {"num_beams": 1, "num_return_sequences": 1, "n": 1, "best_of": 1, "repetition_penalty": 1,
               "length_penalty": 1, "use_cache": True}  # fmt: skip
    for name, value in options.items():
        if name not in neutral or value != neutral[name]:
            raise InputError(
                f"generation option {name}={value!r} is not supported: there are max_new_tokens, until, do_sample, "
                "temperature, top_p and top_k"
            )
    tokens = tokens if most is None else min(tokens, most)
    if not draw:
        return Greedy(max_new_tokens=tokens), until
    return Sample(max_new_tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k or None), until
