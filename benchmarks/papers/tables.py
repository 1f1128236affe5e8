"""The commands and printed figures of the papers' tables, read from commands.toml and figures.toml.

An item (a table or a figure) is a list of runs: `Evaluation` (rows of methods at several keeps), `Profile`,
`Inspection` or `Script`. Each run writes its own command, in which `DATA.jsonl`, `SAMPLES.jsonl`, `MODEL`, `OUT` and
`JUDGE` stand for the user's files.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlkv.cli import build_parser
from vlkv.config import ModelConfig
from vlkv.policies import Policy, Scope, make
from vlkv.tools.benching.settings import Setting
from vlkv.tools.commands.options import policies_from, policy_from, policy_of

DATA, SAMPLES, MODEL, OUT, JUDGE = "DATA.jsonl", "SAMPLES.jsonl", "MODEL", "OUT", "JUDGE"
COUNTED = "teraflops", "cache_gib"  # figures of a computed table that are counted from the config
PAPERS = "AirCache", "PrefixKV", "LightKV", "CSP", "A-VL"

Config = Callable[[], ModelConfig]


class Row(NamedTuple):
    """A row of a table: the name that the paper prints, and the policy as a text for `--policy`."""

    name: str
    policy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A run of `vlkv eval`."""

    rows: tuple[Row, ...]  # in the paper's order
    keeps: tuple[float, ...] = ()  # in the order of the paper's columns; empty: every row has its own
    metrics: tuple[str, ...] = ("exact",)
    scope: Scope | None = None  # of rows that do not name theirs
    on: str = ""  # the models and data sets for which the paper has this table
    layers: int | None = None  # depth of the paper's model, if rows name layers
    judged: bool = False  # whether the metric is a judge
    new_tokens: int | None = None  # limit on the answer, if the default of `vlkv eval` is too small
    data: str = DATA  # the questions, if they are not those of `--data`
    batch: int = 1  # questions that are answered together

    def at_depth(self, depth: int) -> Evaluation:
        """The same run for a model with another number of layers."""
        rows = tuple(Row(name, scaled(policy, self.layers, depth)) for name, policy in self.rows)
        return dataclasses.replace(self, rows=rows, layers=None)

    @property
    def words(self) -> list[str]:
        policies = tuple(dict.fromkeys(row.policy for row in self.at_depth(self.layers or 0).rows))
        judge = JUDGE if self.judged else None
        settings = _options(keep=self.keeps, scope=self.scope, metric=self.metrics, judge=judge)
        limit = _options(max_new_tokens=self.new_tokens, batch=self.batch, out=OUT)
        return ["vlkv", "eval", self.data, *_options(model=MODEL, policy=policies), *settings, *limit]

    def policy(self, row: Row, keep: float | None, config: Config) -> Policy:
        """The policy of a row at a keep, as `vlkv eval` constructs it."""
        return _policy(scaled(row.policy, self.layers, self.layers or 0), keep, self.scope, config)


@functools.cache
def _policy(text: str, keep: float | None, scope: Any, config: Config) -> Policy:
    return policy_of(text, {"keep": keep, "scope": scope}, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A run of `vlkv profile` on `samples` random questions, or on all."""

    keeps: tuple[float, ...]
    samples: int | str = 10
    out: str = "PROFILE.json"
    data: str = SAMPLES
    options: tuple[str, ...] = ()
    on: str = ""

    @property
    def words(self) -> list[str]:
        samples = None if self.samples == "all" else self.samples
        options = [*_options(model=MODEL, keep=self.keeps, samples=samples), *self.options]
        return ["vlkv", "profile", self.data, *options, "--out", self.out]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """A run of `vlkv inspect`."""

    what: str
    policy: str = "full"
    keep: float | None = None
    samples: int | None = None
    new_tokens: int | None = None  # limit on the answer, if it is measured
    on: str = ""

    @property
    def words(self) -> list[str]:
        options = _options(model=MODEL, what=self.what, policy=self.policy, keep=self.keep, samples=self.samples)
        options += _options(max_new_tokens=self.new_tokens)
        return ["vlkv", "inspect", DATA, *options]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A program of `benchmarks`."""

    words: list[str]
    on: str = ""


Run = Evaluation | Profile | Inspection | Script


class Item(NamedTuple):
    """A table or a figure of a paper, or numbers that are only in its text."""

    paper: str
    what: str
    title: str
    runs: tuple[Run, ...]
    missing: str

    @property
    def name(self) -> str:
        """The paper and the number."""
        return f"{self.paper}, {self.what}"


class Point(NamedTuple):
    """A line of a published table of times, operations or bytes: what was measured, and what was printed."""

    model: str  # a name of vlkv.presets
    setting: Setting
    policy: Policy
    figures: dict[str, float]


@dataclasses.dataclass(frozen=True)
class SpeedTable:
    """A published table; figures.toml describes the fields."""

    title: str
    hardware: str
    figures: tuple[str, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    computed: bool = False
    rounds: int = 5

    def shown(self, *, timed: bool) -> list[str]:
        """The figures that are measured, or of a computed table those that are counted or timed."""
        return [name for name in self.figures if not self.computed or (name not in COUNTED) == timed]


# --- reading --------------------------------------------------------------------------------------------------------


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@functools.cache
def items() -> tuple[Item, ...]:
    """All tables and figures, paper by paper."""
    content = _read("commands.toml")
    of_papers = {paper: content.pop(paper) for paper in PAPERS}
    usual = "the checkpoint, and the data sets as JSONL"
    listed = []
    for name, fields in content.items():
        paper, what = name.split(", ")
        runs = tuple(run for described in fields.get("runs", ()) for run in _runs(described, of_papers[paper]))
        listed.append(Item(paper, what, fields["title"], runs, fields.get("missing", usual)))
    return tuple(listed)


def _rows(policies: Mapping[str, str | list[str]]) -> tuple[Row, ...]:
    texts = {name: [text] if isinstance(text, str) else text for name, text in policies.items()}
    return tuple(Row(name, text) for name, several in texts.items() for text in several)


def _runs(described: dict[str, Any], of_paper: Mapping[str, Any]) -> Iterator[Run]:
    """The runs of a line of commands.toml; `of_paper` has the groups of rows and the splits of the paper."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in described.items()
    }
    if "script" in fields:
        module, *words = fields["script"].split()
        yield Script(words=["python", "-m", f"benchmarks.{module}", *words], on=fields.get("on", ""))
    elif "profile" in fields:
        yield Profile(keeps=fields.pop("profile"), **fields)
    elif "inspect" in fields:
        yield Inspection(what=fields.pop("inspect"), **fields)
    else:
        rows = _rows(of_paper["rows"][fields.pop("eval")]) + _rows(fields.pop("plus", {}))
        by_metric, split = fields.pop("by_metric", {}), fields.pop("split", None)
        run = Evaluation(rows=rows, **fields)
        if not by_metric and split is None:
            yield run
        for metrics, data in by_metric.items():
            yield dataclasses.replace(run, metrics=tuple(metrics.split()), on=f"{run.on}: {data}")
        for method, parts in of_paper["splits"][split].items() if split else ():
            for options, data in parts.items():
                given = tuple(Row(name, _with_options(text, method, options)) for name, text in rows)
                yield dataclasses.replace(run, rows=given, on=f"{run.on}: {data}")


def _with_options(policy: str, method: str, options: str) -> str:
    """The policy with further options, if it is this method."""
    name, _, before = policy.partition("(")
    if name != method or not options:
        return policy
    return f"{name}({','.join(filter(None, (before.removesuffix(')'), options)))})"


@functools.cache
def speed_tables() -> dict[str, SpeedTable]:
    """The published tables of times, operations and bytes, by name."""
    tables = {}
    for name, fields in _read("figures.toml").items():
        figures, lines, notes = (fields.pop(field) for field in ("figures", "points", "notes"))
        points = tuple(_point(figures, line) for line in lines)
        tables[name] = SpeedTable(figures=tuple(figures), points=points, notes=tuple(notes), **fields)
    return tables


def _point(names: list[str], line: list[Any]) -> Point:
    model, batch, prompt, text, new, policy, *printed = line
    figures = {name: figure for name, figure in zip(names, printed, strict=False) if figure != ""}
    return Point(model, Setting(batch, prompt, text, new), make(policy), figures)


# --- words ----------------------------------------------------------------------------------------------------------


def _options(**values: Any) -> list[str]:
    """Options of a command line; those without a value are left out."""
    words = []
    for name, value in values.items():
        if value not in (None, ()):
            words += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def scaled(policy: str, layers: int | None, depth: int) -> str:
    """The text with layers of a model of `layers` layers in braces replaced by those of a model of `depth` layers."""
    return re.sub(r"\{(\d+)\}", lambda layer: str(max(1, int(layer[1]) * depth // (layers or 1))), policy)


def no_config() -> ModelConfig:
    """Stands for the model's config, which only a profile needs."""
    raise AssertionError("only a profile needs the model's config")


def plan(words: list[str], config: Config) -> list[Policy]:
    """The policies that a command runs, in order, after its own parser has checked the options."""
    if words[0] != "vlkv" or words[1] not in ("eval", "inspect"):
        return []
    args = build_parser(words[1]).parse_args(words[1:])
    return [policy_from(args, config)] if words[1] == "inspect" else policies_from(args, config)


def line(words: list[str]) -> str:
    """The command as a line for a shell, with double quotes around policies, which contain single ones."""
    return " ".join(shlex.quote(word) if "'" not in word or '"' in word else f'"{word}"' for word in words)
