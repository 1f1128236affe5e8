"""Writes the prompts of a record's conversation, and tokenises them and the reference answers.

Axes: T tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vlkv.inputs import Inputs
from vlkv.processing import Processor
from vlkv.processing.pictures import read_video
from vlkv.processing.prompts import context_part, joined, literal, separated, shared
from vlkv.tools.evaluation.records import Record

_PLACEHOLDER = "x"  # stands for an answer or a question whose text does not matter


def message(record: Record) -> str:
    """The text of the first message: the context and the first question."""
    return joined(record.context, record.turns[0].question)


def prompt(processor: Processor, record: Record, answers: Sequence[str]) -> str:
    """The prompt of the turn after `answers`: all turns up to where the model's text begins, after its prefix."""
    return _written(processor, record, answers) + literal(record.turns[len(answers)].answer_prefix)


def before_question(processor: Processor, record: Record) -> str:
    """The prompt up to where the first question begins."""
    media = len(record.images), len(record.videos)
    return context_part(processor.prompts, record.context, record.turns[0].question, *media)


def first_inputs(
    processor: Processor, groups: Sequence[Sequence[Record]], *, query_agnostic: bool, frames: int
) -> tuple[Inputs, list[list[Int[np.ndarray, " _t"]]]]:
    """The inputs of the first prefill, one row per group, and for each record the ids that follow before its answer.

    `groups` and `query_agnostic` are as in `split`; `frames` is the limit on the frames of a video. Raises InputError
    if a text, an image or a video cannot be used.
    """
    first = [group[0] for group in groups]
    media: list[list[Any]] = [
        [*record.images, *(read_video(video, frames) for video in record.videos)] for record in first
    ]
    inputs = processor(media, [message(record) for record in first])
    parts = [split(processor, group, query_agnostic=query_agnostic) for group in groups]
    inputs = inputs.with_ends([part.dropped for part in parts], [part.end for part in parts], processor.buckets)
    return inputs, [part.fed for part in parts]


class Split(NamedTuple):
    """The first prompts of records, as the change of the first one without its answer prefix."""

    dropped: int  # number of tokens that the prompt loses at its end
    end: Int[np.ndarray, " T"]  # ids that it gets instead
    fed: list[Int[np.ndarray, " _t"]]  # ids that follow the prompt, for each record


def split(processor: Processor, records: Sequence[Record], *, query_agnostic: bool) -> Split:
    """What is prefilled of the first prompts of `records`, and what is fed afterwards.

    Without `query_agnostic` there is one record, and all of its prompt is prefilled; with it the records have the same
    beginning, and only this beginning, up to the question, is. A tokenizer may join the end of the context and the
    beginning of a question into one token. This token is fed with the question, so that the tokens are always those of
    the whole prompt. Raises InputError if a text cannot be used, or the prompt does not begin with the context.
    """
    ordinary = _ids(processor, _written(processor, records[0], []))
    prompts = [_ids(processor, prompt(processor, record, [])) for record in records]
    if not query_agnostic:
        count = shared(ordinary, prompts)
        return Split(len(ordinary) - count, prompts[0][count:], [prompts[0][:0]])
    count = shared(_ids(processor, before_question(processor, records[0])), [ordinary, *prompts])
    return Split(len(ordinary) - count, ordinary[:0], [ids[count:] for ids in prompts])


def reference(processor: Processor, record: Record, answers: Sequence[str]) -> list[int]:
    """Token ids of the reference for the turn after `answers`, and the stop token that follows it.

    The reference is the first accepted answer, tokenised as part of the conversation, as the model would see it. If the
    template writes no stop token after an answer, the first one of the model is taken.
    """
    answer = record.turns[len(answers)].answers[0]
    wanted, before = literal(answer), prompt(processor, record, answers)
    after = _written(processor, record, [*answers, answer])
    begin = after.find(wanted, len(before)) if wanted and after.startswith(before) else -1
    changed = begin < 0  # the template changes the text of an answer
    ids = processor.encode(wanted, begin=False) if changed else processor.beyond(before, after[: begin + len(wanted)])
    stop = processor.config.stop
    end = [] if changed else _ids(processor, after[begin + len(wanted) :]).tolist()
    return [*ids.tolist(), *[token for token in (*end, *stop) if token in stop][:1]]


def truncate(processor: Processor, answer: str, tokens: int) -> str:
    """The answer's text, cut to at most `tokens` tokens."""
    ids = processor.encode(literal(answer), begin=False)
    return answer if len(ids) <= tokens else str(processor.tokenizer.decode(ids[:tokens]))


def later_tokens(processor: Processor, record: Record) -> int:
    """Number of tokens that the conversation adds to the first prompt, not counting the answers."""
    longest = prompt(processor, record, [_PLACEHOLDER] * (len(record.turns) - 1))
    first = prompt(processor, record, [])
    return 0 if longest == first else len(processor.beyond(first, longest))


def _written(processor: Processor, record: Record, answers: Sequence[str]) -> str:
    """`prompt` without an answer prefix; if all questions are answered, a placeholder follows."""
    # Decoding removes the space at the beginning of an answer, so it is added after a prefix.
    said = [
        separated(turn.answer_prefix, " ", answer) + answer for turn, answer in zip(record.turns, answers, strict=False)
    ]
    later = [*(turn.question for turn in record.turns[1:]), _PLACEHOLDER]
    history = list(zip(said, later, strict=False))
    return processor.prompts.write(message(record), len(record.images), len(record.videos), then=history)


def _ids(processor: Processor, text: str) -> Int[np.ndarray, " T"]:
    """The ids of a prompt without those that only the tokenizer adds, in front of every prompt."""
    return processor.encode(text, begin=False)
