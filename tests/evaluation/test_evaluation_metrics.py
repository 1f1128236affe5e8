"""Metrics against values worked out by hand."""

import math
import sys

import numpy as np
import pytest

from vlkv.errors import InputError
from vlkv.tools.evaluation import metrics, protocols, statistics
from vlkv.tools.evaluation.records import Scored


def one(said: str, *accepted: str) -> list[Scored]:
    return [Scored(said, accepted)]


def test_anls():
    pytest.importorskip("rapidfuzz")
    for said, accepted, value in (
        ("abcd", ["abcf"], 0.75),  # one of four letters
        ("ab", ["ac"], 0.0),  # a distance of one half counts no more
        ("abc", ["abd"], 2 / 3),
        ("  New   YORK ", ["new york"], 1.0),
        ("nine", ["seven", "nones", "fine"], 0.75),  # the best answer
        ("", ["x"], 0.0),
        ("", [""], 1.0),
    ):
        assert metrics.anls(one(said, *accepted)) == pytest.approx(value), said
    assert metrics.anls(one("abcd", "abcf") + one("ab", "ac")) == pytest.approx(0.375), "a mean"


def test_exact():
    for said, accepted, same in (
        ("Yes.", ["yes"], 1), (" 4  2", ["4 2"], 1), ("42", ["4 2"], 0), ("b", ["a", "B."], 1), ("a.b", ["ab"], 0),
    ):  # fmt: skip
        assert metrics.exact(one(said, *accepted)) == same, said


def test_rouge_l():
    """2 of 3 words said, 2 of 4 wanted, in order; and the better of two answers."""
    pytest.importorskip("rouge_score")
    assert metrics.rouge_l(one("the cat sat", "The cat, on mat")) == pytest.approx(4 / 7)
    assert metrics.rouge_l(one("the cat sat", "dog", "cat sat")) == pytest.approx(4 / 5)


def test_self_rouge_l():
    """Of "a b c" against the full cache's "a b d" 2 of 3 words; the full cache's own: two drawn answers, 1 of 2."""
    pytest.importorskip("rouge_score")
    assert metrics.self_rouge_l([Scored("a b c", ("x",), full=("a b d",))]) == pytest.approx(2 / 3)
    assert metrics.self_rouge_l([Scored("a b d", ("x",), full=("a b", "a c"))]) == pytest.approx(1 / 2)


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
    metrics.check_metrics(["exact"], 1)


def test_vqa():
    for said, people, value in (
        ("yes", ["yes"] * 2 + ["no"] * 8, (2 * 1 / 3 + 8 * 2 / 3) / 10),
        ("yes", ["yes"] * 4 + ["no"] * 6, 1.0),
        ("yes", ["no"] * 10, 0.0),
        ("The two cats.", ["2 cats"] * 10, 1.0),  # article, number, full stop
        ("dont know", ["don't know"] * 10, 1.0),
        ("red-blue", ["red blue"] * 10, 1.0),  # a mark between letters becomes a space
        ("1,000", ["1000"] * 10, 1.0),
        ("3.5", ["35"] * 10, 0.0),
    ):
        assert protocols.vqa(one(said, *people)) == pytest.approx(value), said


def test_vqa_needs_the_answers_of_people():
    for check in (lambda: protocols.vqa(one("yes", "yes", "yes")), lambda: metrics.check_metrics(["vqa"], 3, 1)):
        with pytest.raises(InputError, match="metric vqa counts how many people"):
            check()


def test_pope_f1():
    """2 of 3 that were said to be there are, 2 of 3 that are there were found."""
    said = ["Yes, it is.", "yes. No.", "Yes", "No, not", "there is no dog"]
    wanted = ["yes", "yes", "no", "Yes", "no"]
    scored = [Scored(*pair) for pair in zip(said, [(w,) for w in wanted], strict=True)]
    assert protocols.pope_f1(scored) == pytest.approx(2 / 3)
    assert protocols.pope_f1(one("no", "no")) == 0


def test_ocrbench():
    assert protocols.ocrbench(one("It says STOP\nhere", "go", "stop here")) == 1
    assert protocols.ocrbench(one("x ^ 2", "x^2")) == 0
    formula = Scored("so x ^ 2", ("x^2",), dataset="HME100k")  # spaces do not count, case does
    assert protocols.ocrbench([formula, formula._replace(answer="X ^ 2")]) == 0.5


def test_mme():
    """One of two images is right in both questions: 75 + 50. The other dataset: one wrong question, 0 + 0."""
    said = [("Yes", "yes", "a", "x"), ("no.", "no", "a", "x"), (" Yes it", "yes", "a", "y"), ("maybe", "no", "a", "y"),
            ("unknown", "yes", "b", "x")]  # fmt: skip
    scored = [Scored(text, (wanted,), dataset=name, images=(image,)) for text, wanted, name, image in said]
    assert protocols.mme(scored) == 125
    assert protocols.mme.columns(scored).shape == (1, 3), "an image is drawn with both of its questions"


def test_f1():
    """{red, big, cat} and {big, cat, sat, here}: 2 in common, 2 * 2 / 7."""
    assert protocols.f1(one("The red, big cat!", "nothing", "a big cat sat here")) == pytest.approx(4 / 7)
    assert protocols.f1(one("", "x")) == 0


def test_needle():
    assert protocols.needle(one("Eat a sandwich, in the park.", "sandwich in park")) == 1
    assert protocols.needle(one("it is 4266", "426")) == 0


def test_judge(tmp_path):
    """The command sees the question, the references and the answer; each different answer is judged once."""
    script = tmp_path / "judge.py"
    script.write_text(
        "import json, sys, pathlib\n"
        "x = json.load(sys.stdin)\n"
        "assert x == {'question': 'why?', 'references': ['a', 'b'], 'answer': x['answer']}\n"
        "with open(sys.argv[1], 'a') as log: log.write(x['answer'])\n"
        "print(len(x['answer']) / 2)\n"
    )
    command = f"{sys.executable} {script} {tmp_path / 'log'}"
    scored = [Scored(said, ("a", "b"), question="why?") for said in ("x", "yyy", "x")]
    assert metrics.chosen([], command)["judge"](scored) == pytest.approx((0.5 + 1.5 + 0.5) / 3)
    assert (tmp_path / "log").read_text() == "xyyy"
    for bad, says in ((f"{sys.executable} -c 'print(1, 2)'", "expected one number"), ("no-such-judge", "cannot be run"),
                      (f"{sys.executable} -c 'raise SystemExit(3)'", "status 3")):  # fmt: skip
        with pytest.raises(InputError, match=says):
            metrics.judge(bad, scored[0])


def test_intervals_of_means():
    """About those of the normal distribution; the same each time; none of one question, none of equal numbers."""
    values = np.random.default_rng(0).normal(3, 2, (1, 400))
    low, high = statistics.interval(metrics.rouge_l, values)
    half = 1.96 * values.std() / 400**0.5
    np.testing.assert_allclose((low, high), (values.mean() - half, values.mean() + half), atol=0.1 * half)
    assert (low, high) == statistics.interval(metrics.rouge_l, values)
    assert statistics.interval(metrics.rouge_l, values[:, :1]) is None
    assert statistics.interval(metrics.rouge_l, np.ones((1, 5))) == (1, 1)


def test_intervals_of_metrics_of_all_questions_together():
    """Log-probabilities are drawn with their numbers of tokens, and "yes" with what is right."""
    low, high = statistics.interval(metrics.perplexity, np.array([[-1, -100], [1, 100]] * 1, float))
    assert (low, high) == pytest.approx((math.e, math.e)), "every draw has a mean of -1 per token"
    low, high = statistics.interval(protocols.pope_f1, np.array([[1, 1, 0], [1, 0, 1], [1, 0, 0]], float))
    assert (low, high) == (0, 1)
    assert statistics.interval(metrics.exact, np.array([[1, 1, 1, 0]], float)) == statistics.wilson(0.75, 4)


def test_differences_are_paired():
    """The same questions are hard for both, so the interval is that of the differences, much narrower."""
    generator = np.random.default_rng(0)
    full = generator.normal(0, 5, (1, 200))
    ours = full - 1 + generator.normal(0, 0.1, full.shape)
    value, (low, high) = statistics.difference(metrics.rouge_l, ours, full)
    assert value == pytest.approx((ours - full).mean()) and -1.05 < low < value < high < -0.95
    # Perplexities of 2 and 4 per token: their difference, not a mean of differences.
    ours, full = (np.array([[math.log(p)] * 3, [1] * 3]) for p in (1 / 4, 1 / 2))
    value, ends = statistics.difference(metrics.perplexity, ours, full)
    assert (value, *ends) == pytest.approx((2, 2, 2))


def test_differences_of_shares_by_hand():
    """Bonett and Price (2012): 2/12 better and 5/12 worse after adding one of each kind; no difference is not sure."""
    full, ours = np.array([[0, 1, 1, 1, 1, 1, 1, 0, 0, 0]]), np.array([[1, 0, 0, 0, 0, 1, 1, 0, 0, 0]])
    value, ends = statistics.difference(metrics.exact, ours, full)
    half = 1.959964 * ((7 / 12 - 1 / 16) / 12) ** 0.5
    assert value == pytest.approx(-0.3) and ends == pytest.approx((-0.25 - half, -0.25 + half))
    value, (low, high) = statistics.difference(metrics.exact, full, full)
    assert value == 0 and low == -high and high > 0.1
    assert statistics.difference(metrics.exact, 0 * full, 1 + 0 * full)[1][0] == -1
