"""Writes the prompts of a record's conversation, and tokenises its reference answers."""

from __future__ import annotations

from collections.abc import Sequence

from vlkv.processing import Processor
from vlkv.processing.prompts import literal
from vlkv.tools.evaluation.records import Record

_PLACEHOLDER = "x"  # stands for an answer or a question whose text does not matter


def prompt(processor: Processor, record: Record, answers: Sequence[str]) -> str:
    """The prompt of the turn after `answers`: all turns up to where the next answer begins."""
    later = [turn.question for turn in record.turns[1 : len(answers) + 1]]
    history = list(zip(answers, later, strict=True))
    return processor.prompts.write(record.turns[0].question, *_count(record), then=history)


def image_part(processor: Processor, record: Record) -> str:
    """The prompt up to where the first question begins."""
    return processor.prompts.before_question(record.turns[0].question, *_count(record))


def reference(processor: Processor, record: Record, answers: Sequence[str]) -> list[int]:
    """Token ids of the reference for the turn after `answers`, and a stop token.

    The reference is the first accepted answer. It is tokenised as part of the conversation, as the model would see it.
    """
    wanted = literal(record.turns[len(answers)].answers[0])
    before = prompt(processor, record, answers)
    questions = [turn.question for turn in record.turns[1 : len(answers) + 1]]
    history = [*zip(answers, questions, strict=True), (record.turns[len(answers)].answers[0], _PLACEHOLDER)]
    after = processor.prompts.write(record.turns[0].question, *_count(record), then=history)
    begin = after.find(wanted, len(before)) if wanted and after.startswith(before) else -1
    changed = begin < 0  # the template changes the text of an answer
    ids = processor.encode(wanted, begin=False) if changed else processor.beyond(before, after[: begin + len(wanted)])
    return [*ids.tolist(), *processor.config.stop[:1]]


def truncate(processor: Processor, answer: str, tokens: int) -> str:
    """The answer's text, cut to at most `tokens` tokens."""
    ids = processor.encode(literal(answer), begin=False)
    return answer if len(ids) <= tokens else str(processor.tokenizer.decode(ids[:tokens]))


def later_tokens(processor: Processor, record: Record, begin: str) -> int:
    """Number of tokens that the whole conversation adds to its beginning `begin`, not counting the answers."""
    longest = prompt(processor, record, [_PLACEHOLDER] * (len(record.turns) - 1))
    return 0 if longest == begin else len(processor.beyond(begin, longest))


def _count(record: Record) -> tuple[int, int]:
    """Number of images and of videos."""
    return len(record.images), len(record.videos)
