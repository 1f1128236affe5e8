"""Metrics against values worked out by hand."""

from __future__ import annotations

import math
import sys

import pytest

from vlkv.errors import InputError
from vlkv.evaluation import metrics
from vlkv.evaluation.metrics import Scored


def one(said: str, *accepted: str) -> list[Scored]:
    return [Scored(said, accepted)]


@pytest.mark.parametrize(
    ("said", "accepted", "value"),
    [
        ("abcd", ["abcf"], 0.75),  # one of four letters
        ("ab", ["ac"], 0.0),  # a distance of one half counts no more
        ("abc", ["abd"], 2 / 3),
        ("  New   YORK ", ["new york"], 1.0),
        ("nine", ["seven", "nones", "fine"], 0.75),  # the best answer
        ("", ["x"], 0.0),
        ("", [""], 1.0),
    ],
)
def test_anls(said, accepted, value):
    pytest.importorskip("rapidfuzz")
    assert metrics.anls(one(said, *accepted)) == pytest.approx(value)


def test_anls_is_a_mean():
    pytest.importorskip("rapidfuzz")
    assert metrics.anls(one("abcd", "abcf") + one("ab", "ac")) == pytest.approx(0.375)


@pytest.mark.parametrize(
    ("said", "accepted", "same"),
    [("Yes.", ["yes"], 1), (" 4  2", ["4 2"], 1), ("42", ["4 2"], 0), ("b", ["a", "B."], 1), ("a.b", ["ab"], 0)],
)
def test_exact(said, accepted, same):
    assert metrics.exact(one(said, *accepted)) == same


def test_rouge_l():
    """2 of 3 words said, 2 of 4 wanted, in order; and the better of two answers."""
    pytest.importorskip("rouge_score")
    assert metrics.rouge_l(one("the cat sat", "The cat, on mat")) == pytest.approx(4 / 7)
    assert metrics.rouge_l(one("the cat sat", "dog", "cat sat")) == pytest.approx(4 / 5)


def test_cider():
    """All n-grams are equally rare: cosines of 1/2, 1/3, 0 and 0 for one to four words; the other answer is perfect."""
    pytest.importorskip("pycocoevalcap")
    wanted = [("a b c d",), ("e f g h",)]

    def value(*said):
        return metrics.cider([Scored(*pair) for pair in zip(said, wanted, strict=True)])

    assert value("A b, x y", "e f g h.") == pytest.approx((10 * (1 / 2 + 1 / 3) / 4 + 10) / 2)
    assert value("e f g h", "a b c d") == 0
    assert value("a b c d", "") == pytest.approx(5)


def test_perplexity():
    scored = [Scored("", ("x",), 2 * math.log(1 / 2), 2), Scored("", ("x",), math.log(1 / 16), 1)]
    assert metrics.perplexity(scored) == pytest.approx(4)
    assert metrics.perplexity([Scored("", ("x",), -1e6, 1)]) == math.inf


def test_a_metric_that_cannot_be_had_is_named(monkeypatch):
    with pytest.raises(InputError, match="no metric 'bleu': there are anls, exact"):
        metrics.check_metrics(["exact", "bleu"], 3)
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(InputError, match=r"anls needs rapidfuzz: pip install rapidfuzz"):
        metrics.check_metrics(["anls"], 3)
    monkeypatch.setattr(metrics, "_PACKAGES", {})
    with pytest.raises(InputError, match="more than one question"):
        metrics.check_metrics(["cider"], 1)
