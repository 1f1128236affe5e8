"""benchmarks.papers: every command runs the settings of the paper, by its own parser, and its dry run works.

settings.txt has the settings as they were copied from the papers by hand: for each command of a table or figure its
metrics, then its rows in the paper's order, each with its policies at all keeps; or what it profiles or inspects."""

import functools
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import vlkv
from benchmarks.papers import commands, listing, speed
from benchmarks.papers.commands import Evaluation, Inspection, Profile, Row, plan, scaled
from benchmarks.papers.one_token import OneToken
from tests import programs
from vlkv import loading, policies
from vlkv.analysis import profiles
from vlkv.cli import build_parser
from vlkv.policies import text_of
from vlkv.tools.benching import settings
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


FIGURES = Path(__file__).with_name("figures.txt")


def test_figures_are_those_of_the_papers():
    """figures.txt was copied from the papers by hand; what AirCache prints agrees with itself, but for one number."""
    lines = []
    for name, table in speed.TABLES.items():
        for point in table.points:
            settings.check_policy(point.policy, vlkv.presets[point.model])
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
        for point in speed.TABLES[name].points:
            ours, printed = speed.count(vlkv.presets[point.model], point), point.figures
            assert ours["cache_bytes"] / 2**30 == pytest.approx(printed["cache_gib"], rel=0.045)
            off = abs(ours["teraflops"] / printed["teraflops"] - 1)
            if isinstance(point.policy, policies.Full):
                assert off < 0.01
            elif point.policy.reducer is not None and off > 0.06:
                far.append((point.model, type(point.policy).__name__))
    assert far == [(f"llava-{kind}-7b", name) for kind, name in (
        ("1.5", "FastV"), ("next-vicuna", "FastV"), ("next-vicuna", "LightKV"))]  # fmt: skip
