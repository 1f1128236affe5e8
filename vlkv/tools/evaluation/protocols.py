"""Metrics of published benchmarks, defined as in the evaluation code of their authors.

vqa        min(people who gave the same answer / 3, 1), averaged over all sets that leave out one person (VQA v2,
           TextVQA; Antol et al. 2015, Sec. 5), after VQA's normalisation of punctuation, articles, numbers and
           contractions. VQA's code normalises only where people disagree; here every answer is normalised.
pope-f1    F1 of "yes" (Li et al. 2023). An answer is "no" if its first sentence has the word no, No or not,
           otherwise "yes".
ocrbench   share of the answers that contain an accepted one (Liu et al. 2024); OCRBench prints it times 1000. Ignores
           case; for the dataset HME100k it ignores spaces instead.
mme        accuracy plus accuracy+ (both questions about an image), in percent, summed over datasets (Fu et al. 2023).
f1         F1 of the words in common with the best accepted answer (SQuAD; question answering in LongBench).
needle     share of the answers that contain an accepted one as whole words (needle in a haystack of text).
"""

import functools
import itertools
import re
import string
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vlkv.errors import InputError
from vlkv.tools.evaluation.records import Scored
from vlkv.tools.evaluation.statistics import Columns, Metric, mean, share

PEOPLE = 3  # with fewer answers, VQA's formula gives at most 1/3 to the right one
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_NUMBERS = ("none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_DIGITS = {name: str(max(0, i - 1)) for i, name in enumerate(_NUMBERS)}


def check_people(answers: int) -> None:
    """Raises InputError unless there are enough accepted answers for `vqa`."""
    if answers < PEOPLE:
        raise InputError(
            "metric vqa counts how many people gave the same answer, so each question needs at least "
            f"{PEOPLE} answers, not {answers}; for one reference use exact or anls"
        )


@mean
def vqa(item: Scored) -> float:
    """VQA accuracy; `Scored.accepted` contains the answers of all people. InputError for fewer than `PEOPLE`."""
    check_people(len(item.accepted))
    answer, people = _vqa_words(item.answer), [_vqa_words(text) for text in item.accepted]
    same = people.count(answer)
    return sum(min(1.0, (same - (person == answer)) / 3) for person in people) / len(people)


def strip_punctuation(text: str) -> str:
    """VQA's punctuation rules.

    A punctuation mark becomes a space. It is removed instead if, anywhere in the text, a space is next to this mark or
    a comma is between two digits. A full stop is removed unless a digit follows.
    """
    result, grouped = text, re.search(r"\d,\d", text) is not None
    for mark in _PUNCTUATION:
        remove = grouped or f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if remove else " ")
    return re.sub(r"\.(?!\d)", "", result)


def _vqa_words(text: str) -> str:
    """VQA's normalisation: lower case, digits instead of number words, no articles, apostrophes in contractions."""
    words = strip_punctuation(" ".join(text.split())).lower().split()
    words = [_DIGITS.get(word, word) for word in words if word not in ("a", "an", "the")]
    return " ".join(_spellings().get(word, word) for word in words)


@functools.cache
def _spellings() -> dict[str, str]:
    """Maps each contraction, with any of its apostrophes left out, to its correct spelling."""
    spellings = {}
    for word in Path(__file__).with_name("contractions.txt").read_text().split():
        parts = word.split("'")
        for marks in itertools.product(("'", ""), repeat=len(parts) - 1):
            spellings["".join(part + mark for part, mark in zip(parts, (*marks, ""), strict=True))] = word
    return spellings


def _pope(scored: Sequence[Scored]) -> list[list[bool]]:
    """For each question whether it was answered with yes, whether yes is right, and whether both."""

    def verdict(text: str) -> str:
        words = text.split(".", maxsplit=1)[0].replace(",", "").split(" ")
        return "no" if {"No", "not", "no"} & set(words) else "yes"

    answered = [verdict(item.answer) == "yes" for item in scored]
    correct = [item.accepted[0].strip().lower() == "yes" for item in scored]
    return [answered, correct, [a and c for a, c in zip(answered, correct, strict=True)]]


def _yes_f1(columns: Columns) -> Any:
    answered, correct, both = columns.sum(axis=-1)
    return 2 * both / np.maximum(answered + correct, 1)


pope_f1 = Metric(_pope, _yes_f1)  # F1 of the answer "yes"


@share
def ocrbench(item: Scored) -> bool:
    """Share of the answers that contain an accepted one."""

    def plain(text: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if item.dataset == "HME100k" else text.lower()

    return any(plain(text) in plain(item.answer) for text in item.accepted)


def _mme(scored: Sequence[Scored]) -> list[list[float]]:
    """What each image adds to the score; reads "yes" or "no" from the first four characters."""
    datasets: dict[str, dict[object, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for item in scored:
        begin = item.answer.strip().lower()[:4]
        verdict = next((word for word in ("yes", "no") if word in begin), None)
        datasets[item.dataset][item.images].append(verdict == item.accepted[0].strip().lower())
    pairs = [(right, images) for images in datasets.values() for right in images.values()]
    return [[100 * sum(right) / sum(map(len, x.values())) + 100 * all(right) / len(x) for right, x in pairs]]


mme = Metric(_mme, lambda columns: columns[0].sum(axis=-1))  # accuracy and accuracy+ in percent, summed over datasets


@mean
def f1(item: Scored) -> float:
    """Mean F1 of the words in common with the best accepted answer."""

    def value(answer: str, accepted: str) -> float:
        words, wanted = _squad_words(answer), _squad_words(accepted)
        common = sum((Counter(words) & Counter(wanted)).values())
        return 2 * common / (len(words) + len(wanted)) if common else 0.0

    return max(value(item.answer, accepted) for accepted in item.accepted)


@share
def needle(item: Scored) -> bool:
    """Share of the answers that contain an accepted one as whole words."""

    def padded(text: str) -> str:
        return f" {' '.join(_squad_words(text))} "

    return any(padded(text) in padded(item.answer) for text in item.accepted)


def _squad_words(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, without punctuation and articles."""
    text = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


PROTOCOLS: Mapping[str, Metric] = {
    "vqa": vqa,
    "pope-f1": pope_f1,
    "ocrbench": ocrbench,
    "mme": mme,
    "f1": f1,
    "needle": needle,
}
