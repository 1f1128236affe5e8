"""Metrics that compare each answer with all its accepted answers. The best match counts, except in CIDEr.

anls          1 - Levenshtein distance / longer length if this is above one half, otherwise 0 (Biten et al. 2019,
              Eq. 1); ignores case and repeated spaces. DocVQA, InfoVQA.
exact         share of answers that equal an accepted one; ignores case, repeated spaces and a full stop at the end.
rouge-l       F-measure of the longest common subsequence of words a-z, 0-9 (Lin 2004; rouge-score).
self-rouge-l  ROUGE-L against the model's own answer from the full cache (PrefixKV, Tables 1 and 2). The score of the
              full cache compares two of its answers, drawn at a temperature.
cider         CIDEr-D (Vedantam et al. 2015; pycocoevalcap) over words, times ten as usual; needs at least two
              questions, because the answers to all questions determine which words are rare.
perplexity    of the first accepted answer and a stop token, with the compressed cache; lower is better.
judge         the mean score from an external command (vlkv/tools/evaluation/judge.py).

Scores of published benchmarks are in vlkv/tools/evaluation/protocols.py.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vlkv.errors import InputError
from vlkv.tools.evaluation.judge import judge
from vlkv.tools.evaluation.protocols import PEOPLE, PROTOCOLS, check_people
from vlkv.tools.evaluation.records import Scored

SELF = "self-rouge-l"
_THRESHOLD = 0.5  # of ANLS


def anls(scored: Sequence[Scored]) -> float:
    """Average normalised Levenshtein similarity."""
    from rapidfuzz.distance import Levenshtein  # noqa: PLC0415 (optional)

    def similarity(answer: str, accepted: str) -> float:
        distance = Levenshtein.normalized_distance(_plain(answer), _plain(accepted))
        return 1 - distance if distance < _THRESHOLD else 0.0

    return float(np.mean([max(similarity(item.answer, accepted) for accepted in item.accepted) for item in scored]))


def exact(scored: Sequence[Scored]) -> float:
    """Share of the answers that equal an accepted one."""

    def bare(text: str) -> str:
        return _plain(text).removesuffix(".").rstrip()

    return float(np.mean([bare(item.answer) in map(bare, item.accepted) for item in scored]))


def rouge_l(scored: Sequence[Scored]) -> float:
    """Mean ROUGE-L."""
    from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 (optional)

    scorer = RougeScorer(["rougeL"])
    return float(np.mean([scorer.score_multi(item.accepted, item.answer)["rougeL"].fmeasure for item in scored]))


def self_rouge_l(scored: Sequence[Scored]) -> float:
    """Mean ROUGE-L against the answer from the full cache; for the full cache, between two drawn answers."""

    def compared(item: Scored) -> str:
        return item.full[1] if len(item.full) > 1 else item.answer

    return rouge_l([Scored(compared(item), item.full[:1]) for item in scored])


def cider(scored: Sequence[Scored]) -> float:
    """CIDEr-D of all questions together."""
    from pycocoevalcap.cider.cider import Cider  # noqa: PLC0415 (optional)

    def words(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.lower()))

    accepted = {i: [words(text) for text in item.accepted] for i, item in enumerate(scored)}
    return float(Cider().compute_score(accepted, {i: [words(item.answer)] for i, item in enumerate(scored)})[0])


def perplexity(scored: Sequence[Scored]) -> float:
    """Perplexity over the reference tokens of all questions together."""
    mean = sum(item.log_probability for item in scored) / sum(item.tokens for item in scored)
    return math.exp(-mean) if -mean < 700 else math.inf


METRICS: dict[str, Callable[[Sequence[Scored]], float]] = {
    "anls": anls,
    "exact": exact,
    "rouge-l": rouge_l,
    "cider": cider,
    "perplexity": perplexity,
    SELF: self_rouge_l,
    **PROTOCOLS,
}
LOWER_IS_BETTER = ("perplexity",)
FRACTIONS = ("anls", "exact", "rouge-l", SELF, *(name for name in PROTOCOLS if name != "mme"))  # shown in percent
_PACKAGES = {"anls": ("rapidfuzz", "rapidfuzz"), "rouge-l": ("rouge_score", "rouge-score"),
             SELF: ("rouge_score", "rouge-score"), "cider": ("pycocoevalcap", "pycocoevalcap")}  # fmt: skip


def check_metrics(names: Sequence[str], questions: int, answers: int = PEOPLE) -> None:
    """Raises InputError for a metric that is unknown, lacks a package, or needs more questions or accepted answers.

    Args:
        names: of the metrics.
        questions: their number.
        answers: the least number of accepted answers of a question.
    """
    for name in names:
        if name not in METRICS:
            raise InputError(f"no metric {name!r}: there are {', '.join(METRICS)}")
        module, package = _PACKAGES.get(name, ("", ""))
        if module and importlib.util.find_spec(module) is None:
            raise InputError(f"metric {name} needs {package}: pip install {package}, or leave it out of --metric")
    if "cider" in names and questions < 2:
        raise InputError("metric cider needs more than one question, to know which words are rare")
    if "vqa" in names:
        check_people(answers)


def score(names: Sequence[str], scored: Sequence[Scored], command: str | None = None) -> dict[str, Any]:
    """The value of every metric by name, and under "judge" the score from the external command, if there is one."""
    judged = {} if command is None else {"judge": judge(command, scored)}
    return {name: METRICS[name](scored) for name in names} | judged


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
