"""The commands of all tables, on the demo model with few layers, 36 image tokens and three questions."""

import json
import sys

import numpy as np
import pytest

from benchmarks.papers import commands, listing, tokens
from benchmarks.papers.commands import Evaluation, Item, Row
from benchmarks.papers.one_token import OneToken
from tests import programs
from tests.evaluation.entries import answering
from vlkv import loading, policies
from vlkv.tools.commands import evaluate
from vlkv.tools.evaluation import report


@pytest.fixture(scope="module")
def model(miniature):
    return str(miniature())


@pytest.fixture
def questions(tmp_path, root):
    """The first three of the shipped questions, with absolute paths, and as many answers as each metric needs."""
    folder = root / "benchmarks" / "data" / "ledger"

    def whole(each):
        return {**each, "image": str(folder / each["image"]), "answers": each["answers"] * 3}

    lines = (folder / "questions.jsonl").read_text().splitlines()[:3]
    found = [json.loads(line) for line in lines]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps(whole(each)) for each in found))
    return file


def run(item, model, questions, tmp_path, name):
    options = ["--batch", "3", "--max-new-tokens", "16"]
    judge = f"{sys.executable} -c print(1)"
    return listing.run_item(item, model=model, data=questions, out=tmp_path / name, judge=judge, options=options)


def test_every_cell_is_from_its_row_and_column():
    """Policies of one keep and of every keep, and rows of the same name that are one method at several keeps."""
    rows = (Row("Vanilla", "full"), Row("B", "h2o"), Row("C", "ivtp(keep=0.5)"), Row("C", "ivtp(keep=0.1)"))
    evaluation = Evaluation(rows=rows, keeps=(0.5, 0.1), metrics=("anls", "exact"), scope="vision", on="a: b")
    plan = commands.plan(evaluation.words, lambda: None)
    results = [{"anls": i + 0.25, "exact": i} for i in range(len(plan))]
    table = listing.grid(evaluation, results, plan, lambda: None)
    assert [column.header for column in table.columns] == ["method", "0.5 anls", "0.5 exact", "0.1 anls", "0.1 exact"]
    assert list(zip(*(column.cells for column in table.columns), strict=True)) == [
        ("Vanilla", "0.25", "0", "0.25", "0"), ("B", "1.25", "1", "2.25", "2"), ("C", "3.25", "3", "4.25", "4"),
    ]  # fmt: skip


def test_runs_that_differ_in_metrics_share_their_answers(model, questions, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "run_all", answering(lambda policy: 2))
    monkeypatch.setattr(report, "plot", lambda *_: None)
    rows = (Row("Vanilla", "full"),)
    item = Item("two", tuple(Evaluation(rows=rows, metrics=(metric,)) for metric in ("anls", "exact")))
    tables = run(item, model, questions, tmp_path, "out")
    assert [table.columns[1].header for table in tables] == ["anls", "exact"]
    assert list(tables[1].columns[1].cells) == ["0.6667"]
    assert "resuming after 3 answers" in capsys.readouterr().err
    assert not (tmp_path / "out" / "2").exists()


def test_tokens_of_questions(model, questions, capsys):
    """AirCache's Table 7, without weights."""
    assert tokens.main([str(questions), "--model", model]) == 0
    processor = loading.load_processor(model)
    text = processor(str(json.loads(questions.read_text().splitlines()[0])["image"]), "what does 4 say?")
    after = int(text.valid.sum()) - 36 - int((text.valid & ~text.is_vision)[0][: np.argmax(text.is_vision[0])].sum())
    assert f"3 questions of {questions}: N_v 36, N_t {after}" in capsys.readouterr().out


PLACES = [({"place": 1}, 0), ({"place": 3}, 2), ({"share": 0.5}, 4), ({"share": 1.0}, 9), ({"share": 0.001}, 0)]


def test_one_token_of_the_ranking_is_left():
    """The token at the place in every layer and head, of 10 vision tokens, or the best if the share is small."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 4, 14, 8)).astype(np.float32), rng.normal(size=(2, 2, 14, 8)).astype(np.float32)
    vision = np.array([False] * 2 + [True] * 10 + [False] * 2)
    kept = np.asarray(programs.select(OneToken(method="h2o", place=3), q, k, k, vision).kept)
    scores = np.asarray(programs.select(policies.H2O(budget=1, scope="vision"), q, k, k, vision).scores)
    order = np.argsort(-scores[..., vision], axis=-1, kind="stable")
    assert kept[..., ~vision].all() and (kept[..., vision].argmax(-1) == order[..., 2]).all()
    assert kept[..., vision].sum(-1).tolist() == [[1, 1]] * 2
    for place, wanted in PLACES:
        rank, count = OneToken(method="h2o", **place).rank(scores[0], None, vision, np.ones(2, int))
        assert (np.asarray(rank)[:, vision].argmax(-1) == order[0, :, wanted]).all() and count.tolist() == [1, 1]
        assert np.asarray(rank).sum(-1).tolist() == [1, 1]
    for place, left in ((1, [1, 1]), (0, [0, 0])):
        assert OneToken(place=place).allocate(None, total=2, most=np.array([9, 9]), layers=2).tolist() == left
