"""benchmarks.papers: every command runs the settings of the paper, by its own parser, and its dry run works."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from benchmarks.papers import listing, settings
from benchmarks.papers.commands import Evaluation, Profile, Row, line, scaled
from vlkv.policies import text_of

TABLES_AND_FIGURES = {
    "AirCache": (13, 9, 0), "PrefixKV": (22, 6, 0), "LightKV": (10, 7, 0), "CSP": (5, 7, 0), "A-VL": (3, 10, 1),
}  # fmt: skip


def test_all_tables_and_figures_are_listed():
    """Each paper has as many tables and figures here as in its text."""
    kinds = "Table", "Figure", "Text"
    names = [(paper, f"{kind} {i + 1}") for paper, counts in TABLES_AND_FIGURES.items()
             for kind, count in zip(kinds, counts, strict=True) for i in range(count)]  # fmt: skip
    assert [each[:2] for each in listing.items()] == names
    assert all(each.item.missing for each in listing.items())


def table(paper, what):
    return next(each for each in listing.items() if each[:2] == (paper, what))


def test_the_commands_have_the_settings_of_the_papers(capsys):
    """settings.toml was made from the papers; its notes have the paper's sentence, its place, and what is done here."""
    assert listing.main(["--check"]) == 0, capsys.readouterr().out
    assert "93 tables and figures" in capsys.readouterr().out
    for title, lines in settings.read().items():
        assert all(all(note) for note in lines.get("notes", [])), title


ANOTHER = {  # a change of the commands, and what the check says
    "keep": ("AirCache, Table 1", {"keeps": (0.5,)}, "keeps: the paper has '0.5 0.1 0.05 0.01' (Table 1)"),
    "metric": ("AirCache, Table 1", {"metrics": ("exact",)}, "metrics: the paper has 'anls'"),
    "order of rows": ("AirCache, Table 12", {"rows": (Row("0.95", "aircache"),)}, "rows: the paper has '0.99, 0.95"),
    "method": ("AirCache, Table 1", {"rows": (Row("Ours", "h2o"),)}, "Ours.method: the paper has 'aircache'"),
    "option": ("AirCache, Table 1", {"rows": (Row("Ours", "aircache(heads='each')"),)}, "Ours.heads: 'each' is in no"),
    "online": ("PrefixKV, Table 1", {"rows": (Row("Ours", "prefixkv"),)}, "Ours.profile: the paper has 'PROFILE"),
    "scope": ("AirCache, Table 1", {"scope": "all"}, "scope: the paper has 'vision'"),
    "samples": ("PrefixKV, Table 1", {"samples": 9}, "profile samples: the paper has '10'"),
    "same questions": ("PrefixKV, Table 1", {"data": "DATA.jsonl"}, "profile data: the paper has 'SAMPLES.jsonl'"),
}  # fmt: skip


@pytest.mark.parametrize("change", ANOTHER)
def test_another_setting_is_found(change):
    title, fields, says = ANOTHER[change]
    listed = table(*title.split(", "))
    kind = Profile if "samples" in fields or "data" in fields else Evaluation
    runs = tuple(dataclasses.replace(run, **fields) if isinstance(run, kind) else run for run in listed.item.runs)
    other = listed._replace(item=listed.item._replace(runs=runs))
    assert any(says in fault for fault in settings.faults(other.settings(settings.read())))


def test_a_reason_without_a_difference_and_an_unknown_name_are_found():
    listed, stated = table("AirCache", "Table 1"), settings.read()
    stated[listed.title]["keeps"] = ["0.5 0.1 0.05 0.01", "Table 1", "why"]
    (fault,) = settings.faults(listed.settings(stated))
    assert "does not differ any more" in fault
    assert list(listing.check([], {"AirCache, Table 14": {}})) == ["AirCache, Table 14: no such table or figure"]


def test_layers_of_another_model_are_scaled():
    run = Evaluation(rows=(("a", "lightkv(layers=({3},{14}),windows=(2,1))"),), layers=32)
    assert "lightkv(layers=(3,14),windows=(2,1))" in run.words
    assert scaled(run.rows[0][1], 32, 6) == "lightkv(layers=(1,2),windows=(2,1))"


def test_a_line_can_be_pasted_into_a_shell():
    for each in listing.items():
        for run in each.item.runs:
            assert shlex.split(line(run.words)) == list(run.words)


@pytest.mark.full
@pytest.mark.usefixtures("shapes_for_arrays")
@pytest.mark.ci("CSP", "A-VL")
@pytest.mark.parametrize("paper", listing.PAPERS)
def test_the_dry_run_of_the_commands(paper):
    """Of each command; policies that differ in numbers alone run the same code, so one of them is enough."""
    runs = [run for each in listing.items() if each.paper == paper for run in each.item.runs]
    different = {re.sub(r"\d+(\.\d+)?", "", text_of(p)): p for run in runs for p in listing.policies_of(run)}
    assert different
    for policy in different.values():
        listing.dry_run(policy)
