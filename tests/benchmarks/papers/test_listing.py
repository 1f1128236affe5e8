"""benchmarks.papers: every command runs the settings of the paper, by its own parser, and its dry run works.

settings.txt has the settings as they were copied from the papers by hand: for each command of a table or figure its
metrics, then its rows in the paper's order, each with its policies at all keeps; or what it profiles or inspects.
"""

import functools
import itertools
import re
from pathlib import Path

import pytest

from benchmarks.papers import commands, listing
from benchmarks.papers.commands import Evaluation, Inspection, Profile, plan, scaled
from vlkv import loading
from vlkv.analysis import profiles
from vlkv.cli import build_parser
from vlkv.policies import text_of
from vlkv.tools.commands import options

SETTINGS = Path(__file__).with_name("settings.txt")
TABLES_AND_FIGURES = {"AirCache": (13, 9), "PrefixKV": (22, 6), "LightKV": (10, 7), "CSP": (5, 7), "A-VL": (3, 10)}


@pytest.fixture(autouse=True)
def made_once(monkeypatch):
    """Parsers and policies, of which many commands have the same."""
    parse, known = options.policy_of, {}

    def policy_of(text, given, config):
        key = text, *given.items()
        if key not in known:
            known[key] = parse(text, given, config)
        return known[key]

    for module in (options, commands):
        monkeypatch.setattr(module, "policy_of", policy_of)
    monkeypatch.setattr(commands, "build_parser", functools.cache(build_parser))


@pytest.fixture
def config(monkeypatch):
    """The config of the demo model, and the text of a policy; the shares of a profile stand for its file."""
    files: list[str] = []

    def load(file, *_, **__):
        files.extend(() if file in files else [file])
        return (1 / (1 + files.index(file)),)

    def text(policy):
        shares = re.search(r"profile=\(([\d.]+),\)", said := text_of(policy))
        return said.replace(shares[0], f"profile='{files[round(1 / float(shares[1])) - 1]}'") if shares else said

    monkeypatch.setattr(profiles, "load", load)
    config = loading.load_processor("mini").config
    return lambda: config, text


def test_all_tables_and_figures_are_listed():
    """Each paper has as many tables and figures here as in its text."""
    names = [(paper, f"{kind} {i + 1}") for paper, counts in TABLES_AND_FIGURES.items()
             for kind, count in zip(("Table", "Figure"), counts, strict=True) for i in range(count)]  # fmt: skip
    assert [each[:2] for each in listing.items()] == names
    assert all(each.item.missing for each in listing.items())


def cells(texts):
    """Policies as text; those that differ in their keep alone are one."""
    grouped: dict[str, list[str]] = {}
    for text in (re.sub(r"(=\d+)\.0\b", r"\1", text) for text in texts):
        keep = re.search(r"keep=([\d.]+)", text)
        grouped.setdefault(text.replace(keep[0], "keep=*") if keep else text, []).append(keep[1] if keep else "")
    return "; ".join(sorted(text.replace("*", "|".join(sorted(keeps))) for text, keeps in grouped.items()))


def settings_of(run, config, text):
    """The lines of a run as in settings.txt."""
    if isinstance(run, Profile):
        args = build_parser("profile").parse_args(run.words[1:])
        assert args.scope == "all"
        keeps = "|".join(map(str, args.keep))
        return [f"profile {keeps}; samples {args.samples}, tolerance {args.tolerance}, steps {args.steps}"]
    if isinstance(run, Inspection):
        (policy,) = listing.policies_of(run)
        return [f"inspect {run.what}; {text_of(policy)}; samples {run.samples}"]
    args, rows, planned = commands.build_parser("eval").parse_args(run.words[1:]), [], []
    for name, same in itertools.groupby(run.rows, lambda row: row.name):
        keeps = run.keeps or (None,)
        made = list(dict.fromkeys(run.policy(row, keep, config) for row in same for keep in keeps))
        rows.append(f"    {name}: {cells(map(text, made))}")
        planned += made
    assert plan(run.words, config) == list(dict.fromkeys(planned)), "the command's own parser"
    # References have hundreds of tokens.
    assert "perplexity" not in args.metric or args.max_new_tokens >= 512
    return [f"eval {', '.join(args.metric)}{' and a judge' if args.judge else ''}", *rows]


def test_every_command_runs_the_settings_of_the_paper(config):
    """Names, policies, order and metrics; of runs that differ in metrics alone, the rows are there once."""
    lines, rows = [], []
    for paper, what, item in listing.items():
        for run in item.runs:
            if not isinstance(run, commands.Script):
                head, *own = settings_of(run, *config)
                lines.append(f"{paper}, {what}: {head}")
                lines += own if own != rows else []
                rows = own or rows
    assert lines == SETTINGS.read_text().splitlines()
    compared = [build_parser("profile").parse_args(run.words[1:]).compare for run in table("PrefixKV", "Table 7").runs]
    assert [path and path.name for path in compared] == [None, "PROFILE.json"]


def table(paper, what):
    return next(each.item for each in listing.items() if each[:2] == (paper, what))


def test_layers_of_another_model_are_scaled():
    run = Evaluation(rows=(("a", "lightkv(layers=({3},{14}),windows=(2,1))"),), layers=32)
    assert "lightkv(layers=(3,14),windows=(2,1))" in run.words
    assert scaled(run.rows[0][1], 32, 6) == "lightkv(layers=(1,2),windows=(2,1))"
