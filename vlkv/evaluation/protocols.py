"""Scores of published benchmarks, by the definitions of their authors' evaluation code.

relaxed    a number may differ by five percent, any other answer must be equal (ChartQA; Masry et al. 2022, Sec. 5.1).
vqa        min(people who gave the same answer / 3, 1), averaged over all sets that leave one person out (VQA v2,
           TextVQA; Antol et al. 2015, Sec. 5), after VQA's normalisation of punctuation, articles, numbers and
           contractions. VQA's code normalises only where people disagree; here every answer is normalised.
pope-f1    F1 of "yes" (Li et al. 2023). An answer is "no" if its first sentence has the word no, No or not, else "yes".
ocrbench   share of the answers that contain an accepted one (Liu et al. 2024); OCRBench prints it times 1000. Case does
           not count; in the dataset HME100k case counts and spaces do not.
mme        accuracy plus accuracy+ (both questions about an image), in percent, summed over datasets (Fu et al. 2023).
f1         F1 of the words in common with the best accepted answer (SQuAD; question answering in LongBench).
needle     share of the answers that contain an accepted one as whole words (needle in a haystack of text).
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from vlkv.evaluation.records import Scored

_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = ("none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {name: str(max(0, i - 1)) for i, name in enumerate(_NUMBERS)}
_CONTRACTIONS = """ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've
needn't not've o'clock oughtn't shan't she'd've should've shouldn't shouldn't've somebody'd somebody'd've somebody'll
somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd
there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're
what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've
wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've"""


def relaxed(scored: Sequence[Scored]) -> float:
    """Relaxed accuracy; a percentage counts as a fraction."""

    def right(said: str, answer: str) -> bool:
        ours, theirs = _number(said), _number(answer)
        if ours is None or not theirs:  # a relative error needs a reference other than 0
            return said.strip().lower() == answer.strip().lower()
        return abs(ours - theirs) <= 0.05 * abs(theirs)

    return _mean(any(right(one.said, answer) for answer in one.accepted) for one in scored)


def _number(text: str) -> float | None:
    text = text.strip()
    try:
        return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return None


def vqa(scored: Sequence[Scored]) -> float:
    """VQA accuracy; `accepted` holds the answer of each person."""

    def accuracy(one: Scored) -> float:
        said, people = _vqa_words(one.said), [_vqa_words(answer) for answer in one.accepted]
        same = people.count(said)
        return _mean(min(1.0, (same - (person == said)) / 3) for person in people)

    return _mean(map(accuracy, scored))


def strip_punctuation(text: str) -> str:
    """VQA's rules: a mark is removed beside a space, or where a comma groups digits; else it becomes a space.

    A full stop is removed unless a digit follows.
    """
    made, grouped = text, re.search(r"\d,\d", text) is not None
    for mark in _PUNCTUATION:
        remove = grouped or f"{mark} " in text or f" {mark}" in text
        made = made.replace(mark, "" if remove else " ")
    return re.sub(r"\.(?!\d)", "", made)


def _vqa_words(text: str) -> str:
    """VQA's normalisation: lower case, digits for numbers, no articles, contractions with their apostrophes."""
    words = strip_punctuation(" ".join(text.split())).lower().split()
    words = [_DIGITS.get(word, word) for word in words if word not in ("a", "an", "the")]
    return " ".join(_WHOLE.get(word, word) for word in words)


def _spellings() -> dict[str, str]:
    """Every contraction with some of its apostrophes left out, and what it stands for."""
    made = {}
    for whole in _CONTRACTIONS.split():
        parts = whole.split("'")
        for marks in itertools.product(("'", ""), repeat=len(parts) - 1):
            made["".join(part + mark for part, mark in zip(parts, (*marks, ""), strict=True))] = whole
    return made


_WHOLE = _spellings()


def pope_f1(scored: Sequence[Scored]) -> float:
    """F1 of the answer "yes"."""

    def says(text: str) -> str:
        words = text.split(".", maxsplit=1)[0].replace(",", "").split(" ")
        return "no" if {"No", "not", "no"} & set(words) else "yes"

    pairs = [(says(one.said), one.accepted[0].strip().lower()) for one in scored]
    said, wanted = (sum(pair[i] == "yes" for pair in pairs) for i in range(2))
    return 2 * pairs.count(("yes", "yes")) / (said + wanted) if said + wanted else 0.0


def ocrbench(scored: Sequence[Scored]) -> float:
    """Share of the answers that contain an accepted one."""

    def plain(text: str, dataset: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if dataset == "HME100k" else text.lower()

    return _mean(
        any(plain(answer, one.dataset) in plain(one.said, one.dataset) for answer in one.accepted) for one in scored
    )


def mme(scored: Sequence[Scored]) -> float:
    """Accuracy and accuracy+ in percent, summed over datasets; "yes" or "no" must be in the first four letters."""
    found: dict[str, dict[object, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for one in scored:
        begin = one.said.strip().lower()[:4]
        says = next((word for word in ("yes", "no") if word in begin), None)
        found[one.dataset][one.images].append(says == one.accepted[0].strip().lower())
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
    """Share of the answers that contain an accepted one."""

    def padded(text: str) -> str:
        return f" {' '.join(_squad_words(text))} "

    return _mean(any(padded(answer) in padded(one.said) for answer in one.accepted) for one in scored)


def _squad_words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    text = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


PROTOCOLS: Mapping[str, Callable[[Sequence[Scored]], float]] = {
    "relaxed": relaxed,
    "vqa": vqa,
    "pope-f1": pope_f1,
    "ocrbench": ocrbench,
    "mme": mme,
    "f1": f1,
    "needle": needle,
}
