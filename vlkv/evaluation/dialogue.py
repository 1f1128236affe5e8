"""Conversations as the model sees them: prompts as text, and the tokens of the reference answers."""

from __future__ import annotations

from collections.abc import Sequence

from vlkv.evaluation.records import Record
from vlkv.processing import Processor

_ANY = "x"  # a placeholder


def prompt(processor: Processor, record: Record, answers: Sequence[str]) -> str:
    """The conversation up to the beginning of the answer that follows `answers`."""
    later = [turn.question for turn in record.turns[1 : len(answers) + 1]]
    history = list(zip(answers, later, strict=True))
    return processor.prompts.write(record.turns[0].question, *_count(record), then=history)


def image_part(processor: Processor, record: Record) -> str:
    """The conversation up to where its first question begins."""
    return processor.prompts.before_question(record.turns[0].question, *_count(record))


def reference(processor: Processor, record: Record, answers: Sequence[str]) -> list[int]:
    """Ids of the first accepted answer to the question after `answers`, tokenised in its context, and its end."""
    wanted = record.turns[len(answers)].answers[0]
    before = prompt(processor, record, answers)
    after = processor.prompts.write(
        record.turns[0].question, *_count(record),
        then=[*zip([*answers, wanted], [*(turn.question for turn in record.turns[1 : len(answers) + 1]), _ANY],
                   strict=True)],
    )  # fmt: skip
    place = after.find(wanted, len(before)) if wanted and after.startswith(before) else -1
    if place < 0:  # the template changes the text of an answer
        ids = processor.tokenizer.encode(wanted, add_special=False)
    else:
        ids = processor.beyond(before, after[: place + len(wanted)])
    return [*ids.tolist(), *processor.config.stop[:1]]


def clipped(processor: Processor, answer: str, tokens: int) -> str:
    """The answer as it goes into the conversation, cut to so many tokens."""
    ids = processor.tokenizer.encode(answer, add_special=False)
    return answer if len(ids) <= tokens else str(processor.tokenizer.decode(ids[:tokens]))


def later_tokens(processor: Processor, record: Record, begin: str) -> int:
    """Tokens that the whole conversation adds to the prompt `begin`, without the answers."""
    longest = prompt(processor, record, [_ANY] * (len(record.turns) - 1))
    return 0 if longest == begin else len(processor.beyond(begin, longest))


def _count(record: Record) -> tuple[int, int]:
    """How many images and videos the prompt is about."""
    return len(record.images), len(record.videos)
