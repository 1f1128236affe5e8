"""benchmarks.papers: every command has the settings of the paper, each cell is from its row and column, and figures."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import vlkv
from benchmarks.papers import __main__ as command
from benchmarks.papers import averages, settings, speed, tables
from benchmarks.papers.one_token import OneToken
from benchmarks.papers.tables import Evaluation, Item, Profile, Row, scaled
from tests import programs
from vlkv import InputError, policies
from vlkv.analysis import cost
from vlkv.tools.benching.settings import check_policy

TABLES_AND_FIGURES = {
    "AirCache": (13, 9, 1), "PrefixKV": (22, 6, 0), "LightKV": (10, 7, 0), "CSP": (5, 7, 0), "A-VL": (3, 10, 7),
}  # fmt: skip


def test_all_tables_and_figures_are_listed():
    """Each paper has as many tables and figures here as in its text."""
    kinds = "Table", "Figure", "Text"
    names = [(paper, f"{kind} {i + 1}") for paper, counts in TABLES_AND_FIGURES.items()
             for kind, count in zip(kinds, counts, strict=True) for i in range(count)]  # fmt: skip
    assert [each[:2] for each in tables.items()] == names
    assert all(each.missing for each in tables.items())


def table(paper, what):
    return next(each for each in tables.items() if each[:2] == (paper, what))


def test_the_commands_have_the_settings_of_the_papers(capsys):
    """settings.toml was made from the papers; its notes have the paper's sentence, its place, and what is done here."""
    assert command.main(["--check"]) == 0, capsys.readouterr().out
    assert "100 tables and figures" in capsys.readouterr().out
    for title, lines in settings.read().items():
        assert all(all(note) for note in lines.get("notes", [])), title


ANOTHER = {  # a change of the commands, and what the check says
    "keep": ("AirCache, Table 1", {"keeps": (0.5,)}, "keeps: the paper has '0.5 0.1 0.05 0.01' (Table 1)"),
    "metric": ("AirCache, Table 1", {"metrics": ("exact",)}, "metrics: the paper has 'anls'"),
    "order of rows": ("AirCache, Table 12", {"rows": (Row("0.95", "aircache"),)}, "rows: the paper has '0.99, 0.95"),
    "method": ("AirCache, Table 1", {"rows": (Row("Ours", "h2o"),)}, "Ours.method: the paper has 'aircache'"),
    "option": ("AirCache, Table 1", {"rows": (Row("Ours", "aircache(rows=8)"),)}, "Ours.rows: '8' is in no"),
    "online": ("PrefixKV, Table 1", {"rows": (Row("Ours", "prefixkv"),)}, "Ours.profile: the paper has 'PROFILE"),
    "scope": ("AirCache, Table 1", {"scope": "all"}, "scope: the paper has 'vision'"),
    "samples": ("PrefixKV, Table 1", {"samples": 9}, "profile samples: the paper has '10'"),
    "option of a method": (
        "CSP, Table 3", {"rows": (Row("CSP (Ours)", "csp(recent_bias=1.5)"),)}, "csp.recent_bias: the paper has '1'",
    ),
    "same questions": ("PrefixKV, Table 1", {"data": "DATA.jsonl"}, "profile data: the paper has 'SAMPLES.jsonl'"),
}  # fmt: skip


@pytest.mark.parametrize("change", ANOTHER)
def test_another_setting_is_found(change):
    title, fields, says = ANOTHER[change]
    item = table(*title.split(", "))
    kind = Profile if "samples" in fields or "data" in fields else Evaluation
    runs = tuple(dataclasses.replace(run, **fields) if isinstance(run, kind) else run for run in item.runs)
    listed = settings.settings(settings.read(), item._replace(runs=runs))
    assert any(says in fault for fault in settings.faults(listed))


def test_a_line_about_a_method_is_for_all_its_rows_but_gives_way_to_one_about_all_rows():
    rows, stated = (Row("a", "lightkv(layers=(3,),windows=(2,))"), Row("b", "lightkv")), {
        "P": {"lightkv.windows": ["", "", "chosen"], "lightkv.rho": ["0.5", "1", "none is 0.5"], "h2o.recent": [""]},
        "P, T": {"*.layers": ["3", "T", "b has none"], "*.method": ["lightkv", "T"]},
    }  # fmt: skip
    listed = settings.settings(stated, Item("P", "T", "", (Evaluation(rows=rows),), ""))
    ours = {line.name: line.ours for line in listed if line.place or line.reason}
    assert ours == {
        "lightkv.windows": "2 4,2,1", "lightkv.rho": "none", "*.layers": "3 none", "*.method": "lightkv",
    }  # fmt: skip
    assert not [line for line in listed if line.name in ("a.windows", "a.layers")]
    stated["P, T"]["*.windows"] = ["2 4,2,1", "T"]
    listed = settings.settings(stated, Item("P", "T", "", (Evaluation(rows=rows),), ""))
    assert "lightkv.windows" not in [line.name for line in listed]


def test_a_split_gives_a_method_its_options_on_each_part_of_the_data():
    of_paper = {
        "rows": {"g": {"A": "h2o", "B": "csp", "C": "csp(regions=False)"}},
        "splits": {"s": {"csp": {"": "x, y", "c=0.9,recent_bias=2.0": "z"}}},
    }
    first, second = tables._runs({"eval": "g", "split": "s", "on": "M"}, of_paper)
    assert (first.on, second.on) == ("M: x, y", "M: z")
    assert [row.policy for row in first.rows] == ["h2o", "csp", "csp(regions=False)"]
    wanted = ["h2o", "csp(c=0.9,recent_bias=2.0)", "csp(regions=False,c=0.9,recent_bias=2.0)"]
    assert [row.policy for row in second.rows] == wanted


def test_a_counted_table_has_times_only_with_timed(capsys):
    """LightKV's Tables 1 and 2 print times beside what is counted; Table 6 does not."""
    assert speed.main(["lightkv-table-2"]) == 0
    counted = capsys.readouterr().out
    assert "teraflops" in counted and "first token" not in counted
    assert tables.speed_tables()["lightkv-table-2"].shown(timed=True) == ["first_token_milliseconds"]
    assert speed.main(["lightkv-table-2", "--timed", "--dry-run"]) == 0
    assert "lightkv" in capsys.readouterr().out
    assert speed.main(["lightkv-table-6", "--timed"]) == 2
    assert "prints no times" in capsys.readouterr().err
    assert speed.main(["a-vl-prefill"]) == 0  # no operations are printed: ours are shown, relative to the full cache
    assert "teraflops" in (counted := capsys.readouterr().out) and "0.91" in counted
    assert tables.speed_tables()["a-vl-table-2"].shown(timed=True) == ["relative_decode"]
    times = {"prefill_times": [1.0, 3.0], "decode_times": [10.0, 12.0]}
    assert (speed.OURS["answer_seconds"](None, times), speed.DEVIATIONS["answer_seconds"](times)) == (13, 2)


def test_a_reason_without_a_difference_and_an_unknown_name_are_found():
    item, stated = table("AirCache", "Table 1"), settings.read()
    stated[item.name]["keeps"] = ["0.5 0.1 0.05 0.01", "Table 1", "why"]
    (fault,) = settings.faults(settings.settings(stated, item))
    assert "does not differ any more" in fault
    assert list(command.check([], {"AirCache, Table 14": {}})) == ["AirCache, Table 14: no such table or figure"]


def test_what_no_code_compares_is_listed_where_it_holds():
    """A line of a paper with a fourth field holds for the tables and for the settings that it names."""
    stated = {"AirCache": {"devices": ["8 A100", "Sec. 4.1", "one", ["timed", "Table 1"]],
                           "frames": ["", "", "at most 8", ["judge"]]}}  # fmt: skip
    shown = {what: [str(line) for line in settings.settings(stated, table("AirCache", what))]
             for what in ("Table 1", "Table 2", "Table 3")}  # fmt: skip
    line = "devices; paper: 8 A100 (Sec. 4.1); ours: one"
    assert [line in lines for lines in shown.values()] == [True, False, True]
    assert list(settings.unknown(stated, tables.items())) == ["AirCache, frames: no table, figure or setting 'judge'"]
    stated["AirCache"]["devices"] = ["8 A100", "Sec. 4.1", "", ["Table 1"]]
    found = settings.faults(settings.settings(stated, table("AirCache", "Table 1")))
    assert "devices: the paper has '8 A100' (Sec. 4.1), the commands None" in found


def test_settings_that_a_command_leaves_to_defaults_are_compared():
    """The temperature of the full cache's answers, and the options of policies that are inspected or timed."""
    names = ["PrefixKV, Table 1", "AirCache, Table 13", "A-VL, Text 1", "A-VL, Figure 5", "CSP, Table 2"]
    facts = {what: settings.facts(table(*what.split(", ")))[0] for what in [*names, "LightKV, Figure 1"]}
    assert facts["PrefixKV, Table 1"]["temperature"] == "0.2" and "temperature" not in facts["AirCache, Table 13"]
    assert facts["AirCache, Table 13"]["scope"] == "vision"
    assert [facts["LightKV, Figure 1"][f"lightkv.{name}"] for name in ("windows", "rate")] == ["4,2,1 6,4,2", "none"]
    assert facts["A-VL, Text 1"]["timed policies"] == "full avl(core=None) avl"
    assert [facts["CSP, Table 2"][f"csp.{name}"] for name in ("c", "window", "fill")] == ["0.5", "none", "False"]
    composed = settings.facts(table("PrefixKV", "Table 15"))[0]
    assert "compose(prefixkv(profile='PROFILE.json',keep=0.125)" in composed["*.method"]
    assert composed["*.profile"].split() == ["PROFILE.json"] * 4
    evaluated = [run for item in tables.items() for run in item.runs if isinstance(run, Evaluation)]
    assert all(run.words[run.words.index("--batch") + 1] == "1" for run in evaluated)
    (run,) = table("A-VL", "Figure 5").runs
    assert facts["A-VL, Figure 5"]["new tokens"] == "21" and run.words[-2:] == ["--max-new-tokens", "21"]


def test_layers_of_another_model_are_scaled():
    run = Evaluation(rows=(("a", "lightkv(layers=({3},{14}),windows=(2,1))"),), layers=32)
    assert "lightkv(layers=(3,14),windows=(2,1))" in run.words
    assert scaled(run.rows[0][1], 32, 6) == "lightkv(layers=(1,2),windows=(2,1))"


def test_every_cell_is_from_its_row_and_column():
    """Policies of one keep and of every keep, and rows of the same name that are one method at several keeps."""
    rows = (Row("Vanilla", "full"), Row("B", "h2o"), Row("C", "ivtp(keep=0.5)"), Row("C", "ivtp(keep=0.1)"))
    evaluation = Evaluation(rows=rows, keeps=(0.5, 0.1), metrics=("anls", "exact"), scope="vision", on="a: b")
    plan = tables.plan(evaluation.words, lambda: None)
    results = [{"anls": i + 0.25, "exact": i} for i in range(len(plan))]
    grid = command.grid(evaluation, results, plan, lambda: None)
    assert [column.header for column in grid.columns] == ["method", "0.5 anls", "0.5 exact", "0.1 anls", "0.1 exact"]
    assert list(zip(*(column.cells for column in grid.columns), strict=True)) == [
        ("Vanilla", "0.25", "0", "0.25", "0"), ("B", "1.25", "1", "2.25", "2"), ("C", "3.25", "3", "4.25", "4"),
    ]  # fmt: skip


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


def test_one_token_of_a_ranking_without_other_modules():
    """AirCache's Sec. 4.3. A dry run tries our own policy on the demo model, because there is no model."""
    (run,) = table("AirCache", "Figure 4").runs
    snapkv = next(row for row in run.rows if row.name.startswith("SnapKV"))
    (policy,) = command.policies_of(dataclasses.replace(run, rows=(snapkv,)))
    assert isinstance(policy, OneToken) and policy.ranking.kernel == 1


FIGURES = Path(__file__).with_name("figures.txt")


def test_figures_are_those_of_the_papers():
    """figures.txt was copied from the papers by hand; what AirCache prints agrees with itself, but for one number."""
    lines = []
    for name, table in tables.speed_tables().items():
        for point in table.points:
            check_policy(point.policy, vlkv.presets[point.model])
            s = point.setting
            figures = ", ".join(f"{name} {figure}" for name, figure in point.figures.items())
            lines.append(f"{name}: {point.model}, batch {s.batch}, prompt {s.prompt}, text {s.text}, new {s.new}, "
                         f"{policies.text_of(point.policy)}: {figures}")  # fmt: skip
            tokens = point.figures.get("tokens_per_second") if name.startswith("aircache") else None
            if tokens not in (None, 214):  # tokens per second are of decoding alone
                assert s.batch * s.new / point.figures["decode_seconds"] == pytest.approx(tokens, rel=0.03)
    assert lines == FIGURES.read_text().splitlines()


@pytest.mark.full
def test_counted_operations_are_near_the_papers():
    """Full caches within 1 %, shortened prompts within 6 %, except for three rows of the 7B models."""
    far = []
    for name in ("lightkv-table-1", "lightkv-table-2", "lightkv-table-6"):
        for point in tables.speed_tables()[name].points:
            s, printed = point.setting, point.figures
            ours = cost.job(vlkv.presets[point.model], point.policy, s.vision, s.text, s.new)
            assert ours["cache_bytes"] / 2**30 == pytest.approx(printed["cache_gib"], rel=0.045)
            off = abs(ours["teraflops"] / printed["teraflops"] - 1)
            if isinstance(point.policy, policies.Full):
                assert off < 0.01
            elif policies.slots_of(point.policy).reduce is not None and off > 0.06:
                far.append((point.model, type(point.policy).__name__))
    assert far == [(f"llava-{kind}-7b", name) for kind, name in (
        ("1.5", "FastV"), ("next-vicuna", "FastV"), ("next-vicuna", "LightKV"))]  # fmt: skip


def test_questions_of_a_profile_are_not_those_that_are_evaluated(miniature, tmp_path):
    """PrefixKV's Tables 8 and 9 have a profile for each of several files."""
    item = Item("Paper", "Table 1", "domains", (Profile(keeps=(0.5,), data="OCR.jsonl"),), "")
    given = {
        "model": str(miniature()),
        "data": tmp_path / "d.jsonl",
        "out": tmp_path / "out",
        "judge": "",
        "options": [],
    }
    with pytest.raises(InputError, match=r"give --file OCR.jsonl=PATH"):
        command.run_item(item, **given)


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
    assert averaged("--same", results) == {str(results): {"full": 1, "h2o": 0}}
    results.write_text(json.dumps({"rows": rows, "answers": [*answers, {"id": "3", "said": ["e", "e"]}]}))
    assert averaged("--same", results)[str(results)]["h2o"] == pytest.approx(1 / 3)
    results.write_text(json.dumps({"rows": rows, "answers": answers}))
    length = f"{sys.executable} -c 'import json, sys; print(len(json.load(sys.stdin)[\"answer\"]))'"
    found = averaged("--by-dataset", data, results, "--judge", length)
    assert (found["h2o"]["part 1"], found["h2o"]["part 2"], found["full"]["mean"]) == (1, 3, 3)
    for words in ([results], [f"{results}=anls"], ["--by-dataset", data, results]):
        assert averages.main([*map(str, words)]) == 2


def test_stored_and_used_cache_of_a_vl():
    """Table 3's megabytes are its percent of the full cache's, so they say no more. Ours are within 1.2 % of each."""
    points = tables.speed_tables()["a-vl-table-3"].points
    full = {p.model: p.figures["cache_megabytes"] for p in points if isinstance(p.policy, policies.Full)}
    for p in points:
        if "stored_percent" in p.figures:
            percent = full[p.model] * p.figures["stored_percent"] / 100
            assert percent == pytest.approx(p.figures["cache_megabytes"], abs=0.5)
            for name in ("stored_percent", "used_percent"):
                assert speed.OURS[name](p, {}) == pytest.approx(p.figures[name], abs=1.2), (p.model, p.policy)
