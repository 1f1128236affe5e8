"""The commands of all tables, on the demo model with few layers, 36 image tokens and three questions."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from benchmarks.papers import averages, commands, listing, speed, tokens
from benchmarks.papers.commands import Evaluation, Item, Profile, Row, Script
from benchmarks.papers.one_token import OneToken
from tests import programs
from tests.evaluation.entries import answering
from vlkv import InputError, loading, policies
from vlkv.analysis import profiles
from vlkv.tools.commands import evaluate
from vlkv.tools.evaluation import report

GIVEN = ["--model", "mini", "--data", "d.jsonl", "--out", "o"]


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


def run(item, model, questions, tmp_path, name, others=True):
    options = ["--batch", "3", "--max-new-tokens", "16"]
    judge = f"{sys.executable} -c print(1)"
    named = {word for run in item.runs for word in run.words if word.endswith(".jsonl") and word != commands.DATA}
    files = dict.fromkeys(named, questions) if others else {}
    return listing.run_item(
        item, model=model, data=questions, out=tmp_path / name, judge=judge, options=options, files=files
    )


@pytest.mark.full
@pytest.mark.parametrize("paper", listing.PAPERS)
def test_every_table_prints_the_rows_and_columns_of_the_paper(paper, miniature, questions, tmp_path, monkeypatch):
    """No model is asked, and no profile is read."""
    monkeypatch.setattr(report, "plot", lambda *_: None)
    monkeypatch.setattr(evaluate, "run_all", answering(lambda policy: 2))
    monkeypatch.setattr(profiles, "load", lambda *_, **__: (0.5,) * 4)
    model = str(miniature(layers=4))
    for each in listing.items():
        if each.paper != paper or not each.what.startswith("Table"):
            continue
        evaluations = tuple(one for one in each.item.runs if isinstance(one, Evaluation))
        item = each.item._replace(runs=evaluations)
        tables = run(item, model, questions, tmp_path, each.what.replace(" ", "-"))
        for table, one in zip(tables, evaluations, strict=True):
            assert list(table.columns[0].cells) == list(dict.fromkeys(row.name for row in one.rows))
            metrics = ["judge"] if one.judged else one.metrics
            columns = [f"{keep:.3g} {m}" for keep in one.keeps for m in metrics] if one.keeps else [*metrics]
            assert [column.header for column in table.columns[1:]] == columns
            cells = [cell for column in table.columns[1:] for cell in column.cells]
            assert all(np.isfinite(float(cell)) for cell in cells) and (not one.judged or set(cells) == {"1"})
        for script in (one for one in each.item.runs if isinstance(one, Script)):
            if script.words[2] == "benchmarks.papers.speed":
                computed = speed.TABLES[script.words[3]].computed
                assert speed.main([script.words[3], *([] if computed else ["--dry-run", "--model", "mini"])]) == 0


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


@pytest.mark.full
def test_a_table_with_a_profile_and_a_pyramid(model, questions, tmp_path, capsys):
    """A short form of PrefixKV's Tables 4 and 15: a profile, a composition, and methods that name their keep."""
    rows = (
        Row("Vanilla", "full"),
        Row("Pyramid", "compose(elasticcache(merging='none'), allocate=pyramidkv)"),
        Row("Ours", "prefixkv(profile='PROFILE.json')"),
    )
    keeps = (0.5, 0.2)
    profile = Profile(keeps=keeps, samples=2)
    item = Item("short", (profile, Evaluation(rows=rows, keeps=keeps, scope="all", metrics=("anls",))))
    (table,) = run(item, model, questions, tmp_path, "out")
    assert list(table.columns[0].cells) == ["Vanilla", "Pyramid", "Ours"]
    assert [column.header for column in table.columns] == ["method", "0.5 anls", "0.2 anls"]
    results = json.loads((tmp_path / "out" / "2" / "results.json").read_text())["rows"]
    whole, *_ = columns = [list(column.cells) for column in table.columns[1:]]
    assert [f"{results[i]['anls']:.4g}" for i in (0, 1, 3)] == whole  # a row has its own policy at each keep
    assert [f"{results[i]['anls']:.4g}" for i in (0, 2, 4)] == columns[1]
    shares = json.loads((tmp_path / "out" / "PROFILE.json").read_text())["profiles"][1]["shares"]
    assert results[4]["policy"] == policies.text_of(policies.PrefixKV(keep=0.2, profile=tuple(shares)))
    # Another keep than those of the profile is refused.
    other = Item("other", (Evaluation(rows=rows, keeps=(0.3,), scope="all", metrics=("anls",)),))
    capsys.readouterr()
    with pytest.raises(InputError, match="a command failed"):
        run(other, model, questions, tmp_path, "out")
    error = capsys.readouterr().err
    assert "measured with keep=0.5, 0.2, but the policy has keep=0.3" in error and error.count("\n") == 1


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


def test_questions_of_a_profile_are_not_those_that_are_evaluated(model, questions, tmp_path):
    """PrefixKV's Tables 8 and 9 have a profile for each of several files."""
    item = Item("domains", (Profile(keeps=(0.5,), data="OCR.jsonl"),))
    with pytest.raises(InputError, match=r"give --file OCR.jsonl=PATH"):
        run(item, model, questions, tmp_path, "out", others=False)


def test_averages(tmp_path, capsys):
    """Relative to the full cache over several files, by data set, and the words of answers."""
    rows = [{"policy": "full", "cider": 0.5, "exact": 0.8}, {"policy": "h2o", "cider": 0.25, "exact": 0.8}]
    answers = [{"id": "1", "said": ["a b c", "a"]}, {"id": "2", "said": ["d", "d d"]}]
    results, data = tmp_path / "results.json", tmp_path / "data.jsonl"
    results.write_text(json.dumps({"rows": rows, "answers": answers}))
    asked = [{"id": str(i), "dataset": f"part {i}", "question": "?", "answers": ["a"]} for i in (1, 2)]
    data.write_text("\n".join(map(json.dumps, asked)))

    def averaged(*words):
        assert averages.main([*map(str, words)]) == 0
        return json.loads(capsys.readouterr().out)

    assert averaged(f"{results}=cider", f"{results}=exact") == {"full": 100, "h2o": 75}
    assert averaged("--lengths", results) == {str(results): {"full": 2, "h2o": 1.5}}
    length = f"{sys.executable} -c 'import json, sys; print(len(json.load(sys.stdin)[\"answer\"]))'"
    found = averaged("--by-dataset", data, results, "--judge", length)
    assert (found["h2o"]["part 1"], found["h2o"]["part 2"], found["full"]["mean"]) == (1, 3, 3)
    for words in ([results], [f"{results}=anls"], ["--by-dataset", data, results]):
        assert averages.main([*map(str, words)]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--run", "AirCache, Table 1", *GIVEN, "--file", "x"], "--file needs NAME=PATH"),
        (["--run", "AirCache, Table 99"], "no such table or figure"),
        (["--run", "AirCache, Table 1"], "needs --model, --data and --out"),
    ],
)
def test_bad_input_is_one_line(refused, options, says):
    refused(listing.main, *options, says=says)


def test_the_list_names_every_command_once_for_all_metrics(capsys):
    assert listing.main(["--paper", "LightKV"]) == 0
    out = capsys.readouterr().out
    assert out.count("LightKV, Table 1: ") == 1 and "the same with --metric mme" in out
    assert listing.main(["--paper", "CSP"]) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("CSP, ") for line in out.splitlines()) == 12, "five tables and seven figures"
    assert "LightKV, Table 6" not in out and "difference: see above" in out


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


def test_one_token_checks_its_options():
    for options in ({"place": -1}, {"share": 1.5}, {"budget": 2}):
        with pytest.raises(InputError, match="OneToken"):
            OneToken(**options)
