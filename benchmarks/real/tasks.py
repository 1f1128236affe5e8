"""Questions about long texts in prose that ships with Python, after the tasks of RULER (Hsieh et al. 2024, Sec. 3).

    copy             the needle is the last sentence of the text (easier than RULER)
    repeated         one key; its sentence stands four times at random depths (easier than RULER)
    word             one key, whose value is a word (easier than RULER)
    one-key          one key, whose value is a number of seven digits (RULER: S-NIAH)
    several-keys     four keys, one of which is asked about (MK-NIAH)
    several-values   one key with two values, both of which are asked about (MV-NIAH; RULER: four)
    variables        a chain of assignments; all variables with the first value are asked about (VT)
    common-words     a numbered list of words, three of which occur often (CWE; RULER asks for ten)
    paragraph        a paragraph about a made-up person among paragraphs of prose (QA; RULER's are from SQuAD)

Templates and answer prefixes are RULER's. A task, a length and a number determine a question.
"""

import bisect
import dataclasses
import hashlib
import re
import tomllib
import zlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlkv.errors import InputError
from vlkv.processing import Processor
from vlkv.tools.evaluation import dialogue
from vlkv.tools.evaluation.protocols import needle
from vlkv.tools.evaluation.records import Record, Scored, Turn

_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text())
_WORDS: dict[str, list[str]] = _DATA["words"]
_SHORTEST = 150  # characters of a paragraph; shorter ones are captions


class Text(NamedTuple):
    """A question whose text has not its final length yet."""

    intro: str
    filler: tuple[str, ...]  # parts of which as many are used as fit
    inserted: tuple[tuple[float, str], ...]  # depths in [0, 1] and the parts that are inserted there
    question: str
    prefix: str
    answers: tuple[str, ...]  # all must be found
    separator: str = " "


def record(processor: Processor, task: str, length: int, number: int) -> Record:
    """A question whose prompt, with the answer prefix, has at most `length` tokens and as many parts as fit.

    Raises InputError if `length` is too short for the task.
    """
    text = TASKS[task](np.random.default_rng([zlib.crc32(task.encode()), length, number]), length)

    def written(count: int) -> Record:
        turn = Turn(text.question, text.answers, text.prefix)
        context = text.intro + _filled(text, count)
        return Record(number + 1, f"{task}-{number}", (), (turn,), dataset=task, context=context)

    def is_longer(count: int) -> bool:
        return len(processor.encode(dialogue.prompt(processor, written(count), []), begin=False)) > length

    count = bisect.bisect_left(range(len(text.filler) + 1), True, key=is_longer) - 1
    if count < 0:
        raise InputError(f"{length} tokens are too few for the task {task}")
    return written(count)


def row(record: Record) -> dict[str, Any]:
    """A question as a row of a file for `vlkv eval`."""
    (turn,) = record.turns
    about = {"id": record.id, "dataset": record.dataset, "context": record.context}
    return {**about, **dataclasses.asdict(turn)}


def score(accepted: Iterable[str], answer: str) -> float:
    """Share of the accepted texts that the answer contains as whole words (RULER: string_match_all)."""
    return float(np.mean([needle([Scored(answer, [text])]) for text in accepted]))


def _filled(text: Text, count: int) -> str:
    """The first `count` parts of the filler with the inserted parts at their depths."""
    inserted = sorted((round(depth * count), order, part) for order, (depth, part) in enumerate(text.inserted))
    parts = list(text.filler[:count])
    for place, _, part in reversed(inserted):
        parts.insert(place, part)
    return text.separator.join(parts)


@cache
def paragraphs() -> tuple[str, ...]:
    """The paragraphs of prose of Python's language reference, which `help()` shows, without code, tables and lists.

    Other versions of Python have other paragraphs; `fingerprint` tells them apart.
    """
    from pydoc_data.topics import topics  # (large)

    parts = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    prose = (" ".join(part.split()) for part in parts if part[:1].isupper() and part.rstrip().endswith("."))
    return tuple(dict.fromkeys(part for part in prose if len(part) >= _SHORTEST))


def fingerprint() -> str:
    """Twelve hexadecimal digits of the SHA-256 of all paragraphs."""
    return hashlib.sha256("\n".join(paragraphs()).encode()).hexdigest()[:12]


@cache
def _sentences() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(re.split(r"(?<=[.!?]) (?=[A-Z])", text)) for text in paragraphs())


@cache
def _words() -> tuple[str, ...]:
    """The lower-case words of the prose with five to eight letters."""
    return tuple(sorted(set(re.findall(r"(?<![^\s])[a-z]{5,8}(?=[\s,.])", " ".join(paragraphs())))))


def _prose(rng: np.random.Generator) -> tuple[str, ...]:
    """Sentences of all paragraphs, in a random order of the paragraphs."""
    return tuple(sentence for i in rng.permutation(len(_sentences())) for sentence in _sentences()[i])


def _text(
    task: str,
    filler: Iterable[str],
    inserted: Iterable[tuple[float, str]],
    answers: Iterable[str],
    separator: str = " ",
    **fields: Any,
) -> Text:
    """A question with the texts of a task, whose fields are filled in."""
    intro, question, prefix = (text.format(**fields) for text in _DATA["texts"][task])
    return Text(intro, tuple(filler), tuple(inserted), question, prefix, tuple(answers), separator)


def _choice(rng: np.random.Generator, items: Iterable[str], count: int = 1) -> list[str]:
    return [str(item) for item in rng.choice(list(items), count, replace=False)]


def _needles(
    rng: np.random.Generator,
    length: int,
    *,
    keys: int = 1,
    values: int = 1,
    repeated: int = 1,
    last: bool = False,
    words: bool = False,
) -> Text:
    """Sentences such as "One of the special magic numbers for river is: 1234567." """
    del length
    kind = "words" if words else "numbers"
    names = _choice(rng, _WORDS["keys"], keys)
    held = [
        _choice(rng, _WORDS["animals"], values) if words else [str(rng.integers(10**6, 10**7)) for _ in range(values)]
        for _ in names
    ]
    pairs = [(name, value) for name, each in zip(names, held, strict=True) for value in each for _ in range(repeated)]
    parts = [f"One of the special magic {kind} for {name} is: {value}." for name, value in pairs]
    what = f"special magic {kind if values > 1 else kind[:-1]} for {names[0]} mentioned in the provided text"
    return _text(
        "needles",
        _prose(rng),
        [(1.0 if last else float(rng.random()), part) for part in parts],
        held[0],
        kind=kind,
        what=what,
        verb="are" if values > 1 else "is",
        article="all the" if values > 1 else "the",
    )


def _variables(rng: np.random.Generator, length: int, *, chain: int = 4) -> Text:
    """`chain` variables, each of which gets the value of the one before."""
    del length
    names: dict[str, None] = {}
    while len(names) < chain:
        names["".join(chr(65 + i) for i in rng.integers(0, 26, 3))] = None
    value = str(rng.integers(10000, 100000))
    depths = np.sort(rng.random(chain))
    sources = [value, *(f"VAR {name}" for name in names)]
    parts = [(float(d), f"VAR {name} = {value}.") for d, name, value in zip(depths, names, sources, strict=False)]
    return _text("variables", _prose(rng), parts, names, value=value, chain=chain)


def _common_words(rng: np.random.Generator, length: int, *, common: int = 3, rare: int = 2) -> Text:
    """A list in which a third of the words are `common` words, and every other word occurs `rare` times."""
    places = length // 4  # a line has at least four tokens
    words = _choice(rng, _words(), common + places // rare)
    often, seldom = words[:common], words[common:]
    listed: list[str] = []
    others = [str(word) for word in rng.permutation([word for word in seldom for _ in range(rare)])]
    for i, word in enumerate(others):  # each prefix of the list has the same shares
        listed += [word, often[i // 2 % common]] if i % 2 else [word]
    lines = [f"{i}. {word}" for i, word in enumerate(listed, start=1)]
    return _text("common-words", lines, [], often, separator="\n", common=common)


def _paragraph(rng: np.random.Generator, length: int) -> Text:
    """Numbered documents, one of which is about the person whom the question names."""
    del length
    name, city, job, animal = (_choice(rng, _WORDS[kind])[0] for kind in ("names", "cities", "jobs", "animals"))
    person = {"name": name, "city": city, "job": job, "animal": animal}
    asked = {question.format(name=name): rest for question, *rest in _DATA["person"]["questions"]}
    question = _choice(rng, asked)[0]
    prefix, answer = asked[question]
    documents = [f"Document: {paragraphs()[i]}" for i in rng.permutation(len(paragraphs()))]
    about = [(float(rng.random()), _DATA["person"]["about"].format(**person))]
    fields = {"question": question, "name": name, "prefix": prefix}
    return _text("paragraph", documents, about, [person[answer]], separator="\n\n", **fields)


TASKS: dict[str, Callable[[np.random.Generator, int], Text]] = {
    "copy": partial(_needles, last=True),
    "repeated": partial(_needles, repeated=4),
    "word": partial(_needles, words=True),
    "one-key": _needles,
    "several-keys": partial(_needles, keys=4),
    "several-values": partial(_needles, values=2),
    "variables": _variables,
    "common-words": _common_words,
    "paragraph": _paragraph,
}
