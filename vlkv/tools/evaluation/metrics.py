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
judge         the mean score from an external command.

Scores of published benchmarks are in vlkv/tools/evaluation/protocols.py.
"""

import functools
import importlib.util
import json
import math
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vlkv.errors import InputError
from vlkv.tools.evaluation.protocols import PEOPLE, PROTOCOLS, check_people
from vlkv.tools.evaluation.records import Scored
from vlkv.tools.evaluation.statistics import Metric, mean, share


def judge(command: str, item: Scored) -> float:
    """The score that a command, which is run without a shell, prints for an answer.

    Its standard input is one JSON object with `question`, `references` (a list) and `answer`; its standard output must
    be one number, or InputError is raised.
    """
    return _score(command, item.question, tuple(item.accepted), item.answer)


@functools.cache  # several policies often give the same answer
def _score(command: str, question: str, references: tuple[str, ...], answer: str) -> float:
    task = json.dumps({"question": question, "references": list(references), "answer": answer})
    try:
        process = subprocess.run(shlex.split(command), input=task, capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        raise InputError(f"--judge {command}: cannot be run ({error})") from None
    if process.returncode:
        raise InputError(f"--judge {command}: failed with status {process.returncode}: {process.stderr.strip()[-200:]}")
    try:
        value = float(process.stdout)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"--judge {command}: printed {process.stdout.strip()[:80]!r}, expected one number")
    return value


SELF = "self-rouge-l"
_THRESHOLD = 0.5  # of ANLS


@mean
def anls(item: Scored) -> float:
    """Average normalised Levenshtein similarity."""
    from rapidfuzz.distance import Levenshtein  # noqa: PLC0415 (optional)

    def similarity(accepted: str) -> float:
        distance = Levenshtein.normalized_distance(_plain(item.answer), _plain(accepted))
        return 1 - distance if distance < _THRESHOLD else 0.0

    return max(map(similarity, item.accepted))


@share
def exact(item: Scored) -> bool:
    """Share of the answers that equal an accepted one."""

    def bare(text: str) -> str:
        return _plain(text).removesuffix(".").rstrip()

    return bare(item.answer) in map(bare, item.accepted)


@functools.cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # noqa: PLC0415 (optional)

    return RougeScorer(["rougeL"])


def _rouge_l(item: Scored) -> float:
    return _rouge().score_multi(item.accepted, item.answer)["rougeL"].fmeasure


def _self_rouge_l(item: Scored) -> float:
    """ROUGE-L against the answer from the full cache; for the full cache, between two drawn answers."""
    answer = item.full[1] if len(item.full) > 1 else item.answer
    return _rouge_l(Scored(answer, item.full[:1]))


def _cider(scored: Sequence[Scored]) -> Any:
    """CIDEr-D of each question; all questions together determine which words are rare."""
    from pycocoevalcap.cider.cider import Cider  # noqa: PLC0415 (optional)

    def words(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.lower()))

    accepted = {i: [words(text) for text in item.accepted] for i, item in enumerate(scored)}
    return [Cider().compute_score(accepted, {i: [words(item.answer)] for i, item in enumerate(scored)})[1]]


rouge_l, self_rouge_l, cider = mean(_rouge_l), mean(_self_rouge_l), Metric(_cider)
# Over the reference tokens of all questions together.
perplexity = Metric(
    parts=lambda scored: [[item.log_probability for item in scored], [item.tokens for item in scored]],
    combine=lambda columns: np.exp(-columns[0].sum(axis=-1) / columns[1].sum(axis=-1)),
)

_OWN = {"anls": anls, "exact": exact, "rouge-l": rouge_l, "cider": cider, "perplexity": perplexity, SELF: self_rouge_l}
METRICS: Mapping[str, Metric] = {**_OWN, **PROTOCOLS}
LOWER_IS_BETTER = ("perplexity",)
FRACTIONS = ("anls", "exact", "rouge-l", SELF, *(name for name in PROTOCOLS if name != "mme"))  # shown in percent
_PACKAGES = {"anls": "rapidfuzz", "rouge-l": "rouge-score", SELF: "rouge-score", "cider": "pycocoevalcap"}


def check_metrics(names: Sequence[str], questions: int, answers: int = PEOPLE) -> None:
    """Raises InputError for a metric that is unknown, lacks a package, or needs more questions or accepted answers."""
    for name in names:
        if name not in METRICS:
            raise InputError(f"no metric {name!r}: there are {', '.join(METRICS)}")
        package = _PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package.replace("-", "_")) is None:
            raise InputError(f"metric {name} needs {package}: pip install {package}, or leave it out of --metric")
    if "cider" in names and questions < 2:
        raise InputError("metric cider needs more than one question, to know which words are rare")
    if "vqa" in names:
        check_people(answers)


def chosen(names: Sequence[str], command: str | None = None) -> dict[str, Metric]:
    """The metrics of these names, and under "judge" that of an external command, if there is one."""
    judged = {} if command is None else {"judge": mean(functools.partial(judge, command))}
    return {name: METRICS[name] for name in names} | judged


def _plain(text: str) -> str:
    return " ".join(text.lower().split())
