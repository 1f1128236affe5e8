"""Scores of published benchmarks, by the definitions of their authors' evaluation code.

relaxed       numbers may be five percent off, other answers must be equal (ChartQA; Masry et al. 2022, Sec. 5.1).
vqa           min(people who gave this answer / 3, 1), mean over all sets of all people but one (VQA v2, TextVQA;
              Antol et al. 2015, Sec. 5), after VQA's normalisation of punctuation, articles, numbers, contractions.
pope-f1       F1 of "yes" (Li et al. 2023); an answer whose first sentence has no, No or not is a no, any other a yes.
ocrbench      share of answers that contain an accepted one (Liu et al. 2024); the benchmark multiplies it by 1000.
              Blanks and case count for the dataset HME100k alone, and there blanks are removed.
mme           sum over datasets of accuracy and of accuracy+ (both questions on an image), in percent (Fu et al. 2023).
f1            F1 of the words in common, best per question (SQuAD; LongBench's question answering).
needle        share of answers that contain an accepted one as whole words (needles in a haystack of text).
self-rouge-l  ROUGE-L against the model's own answer from the full cache (PrefixKV, Tables 1 and 2).
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vlkv.errors import InputError

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = ("none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_CONTRACTIONS = """ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
he'd he'd've he's how'd how'll how's I'd've I'm I've isn't it'd it'd've it'll let's ma'am mightn't mightn't've might've
mustn't must've needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd've
somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's
there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll
what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't
would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"""


class Scored(NamedTuple):
    """An answer to one question."""

    said: str
    accepted: Sequence[str]
    log_probability: float = 0.0  # of the reference
    tokens: int = 0  # of the reference, its end included
    question: str = ""
    dataset: str = ""  # or category, for scores that are sums over them
    pictures: tuple[object, ...] = ()  # that it is about
    full: str | None = None  # the answer from the full cache


def relaxed(scored: Sequence[Scored]) -> float:
    """Relaxed accuracy."""

    def right(said: str, answer: str) -> bool:
        ours, theirs = _number(said), _number(answer)
        if ours is None or not theirs:  # a relative error of nothing is none
            return said.strip().lower() == answer.strip().lower()
        return abs(ours - theirs) <= 0.05 * abs(theirs)

    return _mean(any(right(one.said, answer) for answer in one.accepted) for one in scored)


def _number(text: str) -> float | None:
    """A number, or a percentage as a fraction."""
    text = text.strip()
    try:
        return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def vqa(scored: Sequence[Scored]) -> float:
    """VQA accuracy, where `accepted` holds what each person answered."""

    def accuracy(one: Scored) -> float:
        people = [_vqa_words(answer) for answer in one.accepted]
        said, agreed = _vqa_words(one.said), []
        for i in range(len(people)):
            others = people[:i] + people[i + 1 :]
            agreed.append(min(1.0, others.count(said) / 3))
        return float(np.mean(agreed))

    return _mean(map(accuracy, scored))


def _vqa_words(text: str) -> str:
    """Lower case, digits for numbers, no articles, contractions with their apostrophes, VQA's rules of punctuation."""
    text = " ".join(text.split())
    made = text
    for mark in _PUNCTUATION:  # removed beside a blank, or where the text has a comma inside a number; else a blank
        apart = f"{mark} " in text or f" {mark}" in text or re.search(r"\d,\d", text)
        made = made.replace(mark, "" if apart else " ")
    made = re.sub(r"\.(?!\d)", "", made).lower()
    digits = {name: str(max(0, i - 1)) for i, name in enumerate(_NUMBERS)}
    words = [digits.get(word, word) for word in made.split() if word not in ("a", "an", "the")]
    return " ".join(_WHOLE.get(word, word) for word in words)


def _whole_contractions() -> dict[str, str]:
    """Every contraction with some of its apostrophes left out, to the whole one."""
    made = {}
    for whole in _CONTRACTIONS.split():
        parts = whole.split("'")
        for marks in itertools.product(("'", ""), repeat=len(parts) - 1):
            written = "".join(itertools.chain.from_iterable(itertools.zip_longest(parts, marks, fillvalue="")))
            made[written.lower()] = whole.lower()
    return made


_WHOLE = _whole_contractions()


def pope_f1(scored: Sequence[Scored]) -> float:
    """F1 of the answer yes."""
    pairs = [(_pope_says(one.said), one.accepted[0].strip().lower()) for one in scored]
    right = sum(pair == ("yes", "yes") for pair in pairs)
    said, wanted = (sum(pair[i] == "yes" for pair in pairs) for i in range(2))
    return 2 * right / (said + wanted) if said + wanted else 0.0


def _pope_says(text: str) -> str:
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def ocrbench(scored: Sequence[Scored]) -> float:
    """Share of answers that contain an accepted one."""

    def plain(text: str, dataset: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if dataset == "HME100k" else text.lower()

    return _mean(
        any(plain(answer, one.dataset) in plain(one.said, one.dataset) for answer in one.accepted) for one in scored
    )


def mme(scored: Sequence[Scored]) -> float:
    """Accuracy and accuracy+ in percent, summed over datasets; yes or no is looked for in the first four letters."""
    found: dict[str, dict[object, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for one in scored:
        begin = one.said.strip().lower()[:4]
        says = next((word for word in ("yes", "no") if word in begin), None)
        found[one.dataset][one.pictures].append(says == one.accepted[0].strip().lower())
    return sum(
        100 * _mean(itertools.chain.from_iterable(images.values())) + 100 * _mean(map(all, images.values()))
        for images in found.values()
    )


def f1(scored: Sequence[Scored]) -> float:
    """Mean F1 of words."""

    def value(said: str, answer: str) -> float:
        ours, theirs = _squad_words(said), _squad_words(answer)
        common = sum((Counter(ours) & Counter(theirs)).values())
        return 2 * common / (len(ours) + len(theirs)) if common else 0.0

    return _mean(max(value(one.said, answer) for answer in one.accepted) for one in scored)


def needle(scored: Sequence[Scored]) -> float:
    """Share of answers with an accepted one in them."""

    def has(said: str, answer: str) -> bool:
        return f" {' '.join(_squad_words(answer))} " in f" {' '.join(_squad_words(said))} "

    return _mean(any(has(one.said, answer) for answer in one.accepted) for one in scored)


def _squad_words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    text = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def self_rouge_l(scored: Sequence[Scored]) -> float:
    """Mean ROUGE-L against the answers of the full cache."""
    from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 (optional)

    if any(one.full is None for one in scored):
        raise InputError("self-rouge-l compares with the full cache: add the policy full")
    scorer = RougeScorer(["rougeL"])
    return _mean(scorer.score(str(one.full), one.said)["rougeL"].fmeasure for one in scored)


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]


PROTOCOLS: Mapping[str, Callable[[Sequence[Scored]], float]] = {
    "relaxed": relaxed,
    "vqa": vqa,
    "pope-f1": pope_f1,
    "ocrbench": ocrbench,
    "mme": mme,
    "f1": f1,
    "needle": needle,
    "self-rouge-l": self_rouge_l,
}
