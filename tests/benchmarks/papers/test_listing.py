"""benchmarks.papers: every command runs the settings of the paper, by its own parser, and its dry run works."""

from __future__ import annotations

import re

import numpy as np
import pytest

from benchmarks.papers import listing
from benchmarks.papers.commands import Evaluation, Inspection, Profile, line, plan, scaled
from tests.benchmarks.papers import settings
from vlkv import loading
from vlkv.analysis import profiles
from vlkv.cli import build_parser
from vlkv.policies import Full, Policy, PrefixKV, text_of


def listed(paper: str) -> dict[str, listing.Listed]:
    return {each.what: each for each in listing.items() if each.paper == paper}


def runs(paper: str, kind: type) -> dict[str, list]:
    """The runs of one kind of every table and figure that has some."""
    found = {what: [run for run in each.item.runs if isinstance(run, kind)] for what, each in listed(paper).items()}
    return {what: same for what, same in found.items() if same}


def test_all_tables_and_figures_are_listed():
    """Each paper has as many tables and figures here as in its text."""
    counts = {"AirCache": (13, 9), "PrefixKV": (22, 6), "LightKV": (10, 7), "CSP": (5, 7), "A-VL": (3, 10)}
    for paper, (tables, figures) in counts.items():
        names = [f"Table {i + 1}" for i in range(tables)] + [f"Figure {i + 1}" for i in range(figures)]
        assert list(listed(paper)) == names
    assert list(listing.PAPERS) == list(counts)
    assert all(each.item.missing for each in listing.items())


@pytest.fixture
def profiled(tmp_path, monkeypatch):
    """Makes PrefixKV of a file of `settings` and a keep; the current folder has a profile of the demo model in each."""
    monkeypatch.chdir(tmp_path)
    config = loading.load_processor("mini").config
    keeps: dict[str, set[float]] = {}
    for run in (run for same in runs("PrefixKV", Profile).values() for run in same):
        keeps.setdefault(run.out, set()).update(run.keeps)
    shares = {}
    for number, file in enumerate(keeps):  # every file and keep has its own shares
        ratios = {PrefixKV(keep=k): np.full((1, config.decoder.layers), (k + number / 1e3) / 2) for k in keeps[file]}
        content = profiles.save(file, ratios, config, name="mini")
        shares[file] = {each["keep"]: tuple(each["shares"]) for each in content["profiles"]}

    def make(column: settings.Column) -> Policy:
        if isinstance(column, Policy):
            return column
        file, keep, merging = column
        return PrefixKV(keep=keep, scope="all", merging=merging, profile=shares[file][keep])

    return make


@pytest.mark.parametrize("paper", listing.PAPERS)
def test_every_evaluation_runs_the_settings_of_the_paper(paper, profiled):
    """Names, policies, order and metrics, from the command's own parser, against the settings copied by hand."""
    config = loading.load_processor("mini").config
    ours, expected = runs(paper, Evaluation), settings.EVALUATIONS[paper]
    assert list(ours) == [what for what in listed(paper) if what in expected] and len(ours) == len(expected)
    for what, same in ours.items():
        assert len(same) == len(expected[what]), what
        for run, want in zip(same, expected[what], strict=True):
            words = run.words
            args = build_parser("eval").parse_args(words[1:])
            assert args.metric == (want.metrics.split() or ["exact"]), what
            assert (args.judge is not None) == want.judge, what
            assert list(dict.fromkeys(name for name, _ in run.rows)) == [name for name, _ in want.rows], what
            columns = [profiled(column) for _, row in want.rows for column in row]
            assert plan(words, lambda: config) == list(dict.fromkeys(columns)), what
            for name, row in want.rows:  # the printed table takes each cell from its row and column
                cells = [profiled(column) for column in row]
                same_name = [each for each in run.rows if each.name == name]
                keeps = run.keeps if len(cells) > 1 or run.keeps else (None,)
                if not isinstance(cells[0], Full):
                    made = {run.policy(each, keep, lambda: config) for each in same_name for keep in keeps}
                    assert made == set(cells), (what, name)
            if "perplexity" in want.metrics:
                assert args.max_new_tokens >= 512, what  # references have hundreds of tokens


def test_every_profile_has_the_samples_keeps_and_search_of_the_paper():
    found = runs("PrefixKV", Profile)
    assert list(found) == list(settings.PROFILES)
    for what, want in settings.PROFILES.items():
        parsed = [build_parser("profile").parse_args(run.words[1:]) for run in found[what]]
        assert [(args.keep, args.samples, args.tolerance, args.steps) for args in parsed] == want, what
        assert all(args.scope == "all" for args in parsed)
    assert [
        args.compare and args.compare.name
        for args in (build_parser("profile").parse_args(run.words[1:]) for run in found["Table 7"])
    ] == [None, "PROFILE.json"]


@pytest.mark.parametrize("paper", listing.PAPERS)
def test_every_inspection_measures_the_policy_of_the_paper(paper):
    found = runs(paper, Inspection)
    assert list(found) == list(settings.INSPECTIONS[paper])
    for what, want in settings.INSPECTIONS[paper].items():
        assert [(run.what, *listing.policies_of(run), run.samples) for run in found[what]] == want, what


def test_layers_of_another_model_are_scaled():
    run = Evaluation(rows=(("a", "lightkv(layers=({3},{14}),windows=(2,1))"),), layers=32)
    assert "lightkv(layers=(3,14),windows=(2,1))" in run.words
    assert scaled(run.rows[0][1], 32, 6) == "lightkv(layers=(1,2),windows=(2,1))"


def test_a_line_can_be_pasted_into_a_shell():
    import shlex

    for each in listing.items():
        for run in each.item.runs:
            assert shlex.split(line(run.words)) == list(run.words)


@pytest.mark.full
@pytest.mark.usefixtures("shapes_for_arrays")
@pytest.mark.parametrize("paper", listing.PAPERS)
def test_the_dry_run_of_the_commands(paper):
    """Of each command; policies that differ in numbers alone run the same code, so one of them is enough."""
    every = [policy for each in listed(paper).values() for run in each.item.runs for policy in listing.policies_of(run)]
    different = {re.sub(r"\d+(\.\d+)?", "", text_of(p)): p for p in every}
    assert different
    for policy in different.values():
        listing.dry_run(policy)
