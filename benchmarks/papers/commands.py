"""The commands of the papers' tables and figures, from their settings.

A table is a list of runs: `Evaluation` (rows of methods at several keeps), `Profile`, `Inspection` or `Script`. Each
run writes its own command. `DATA.jsonl`, `SAMPLES.jsonl`, `MODEL`, `OUT` and `JUDGE` stand for the user's files.

The policy of a row is a text as for `--policy`. In it, {14} is layer 14 of the paper's model; for a model of another
depth it is scaled.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Callable
from typing import NamedTuple

from vlkv.cli import build_parser
from vlkv.config import ModelConfig
from vlkv.policies import Policy, Scope
from vlkv.tools.commands.options import policies_from, policy_from, policy_of

DATA, SAMPLES, MODEL, OUT, JUDGE = "DATA.jsonl", "SAMPLES.jsonl", "MODEL", "OUT", "JUDGE"
PROFILE = "PROFILE.json"  # made by an earlier command of the same table
VANILLA = "full"

Config = Callable[[], ModelConfig]


class Row(NamedTuple):
    """A row of a table: the name that the paper prints, and the policy."""

    name: str
    policy: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A run of `vlkv eval`.

    Attributes:
        rows: in the paper's order.
        keeps: in the order of the paper's columns; empty: every row has its own.
        metrics: of `vlkv eval`.
        scope: of rows that do not name theirs.
        on: the models and data sets for which the paper has this table.
        layers: depth of the paper's model, if rows name layers.
        judged: whether the metric is a judge.
        new_tokens: limit on the answer, if the default of `vlkv eval` is too small.
        data: the questions, if they are not those of `--data`.
    """

    rows: tuple[Row, ...]
    keeps: tuple[float, ...] = ()
    metrics: tuple[str, ...] = ("exact",)
    scope: Scope | None = None
    on: str = ""
    layers: int | None = None
    judged: bool = False
    new_tokens: int | None = None
    data: str = DATA

    def at_depth(self, depth: int) -> Evaluation:
        """The same run for a model with another number of layers."""
        rows = tuple(Row(name, scaled(policy, self.layers, depth)) for name, policy in self.rows)
        return dataclasses.replace(self, rows=rows, layers=None)

    @property
    def words(self) -> list[str]:
        """The command."""
        own = self.at_depth(self.layers or 0)
        metrics = [*own.metrics] if own.metrics else []
        return [
            "vlkv", "eval", self.data, "--model", MODEL, "--policy", *dict.fromkeys(row.policy for row in own.rows),
            *(["--keep", *map(str, own.keeps)] if own.keeps else []),
            *(["--scope", own.scope] if own.scope else []),
            *(["--metric", *metrics] if metrics else []),
            *(["--judge", JUDGE] if own.judged else []),
            *(["--max-new-tokens", str(own.new_tokens)] if own.new_tokens else []),
            "--out", OUT,
        ]  # fmt: skip

    def policy(self, row: Row, keep: float | None, config: Config) -> Policy:
        """The policy of a row at a keep, as `vlkv eval` constructs it."""
        text = scaled(row.policy, self.layers, self.layers or 0)
        return policy_of(text, {"keep": keep, "scope": self.scope}, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A run of `vlkv profile`: `samples` random questions; None: all."""

    keeps: tuple[float, ...]
    samples: int | None = 10
    out: str = PROFILE
    data: str = SAMPLES
    options: tuple[str, ...] = ()
    on: str = ""

    @property
    def words(self) -> list[str]:
        """The command."""
        return [
            "vlkv", "profile", self.data, "--model", MODEL, "--keep", *map(str, self.keeps),
            *([] if self.samples is None else ["--samples", str(self.samples)]), *self.options, "--out", self.out,
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """A run of `vlkv inspect`."""

    what: str
    policy: str = VANILLA
    keep: float | None = None
    samples: int | None = None
    on: str = ""

    @property
    def words(self) -> list[str]:
        """The command."""
        return [
            "vlkv", "inspect", DATA, "--model", MODEL, "--what", self.what, "--policy", self.policy,
            *([] if self.keep is None else ["--keep", str(self.keep)]),
            *([] if self.samples is None else ["--samples", str(self.samples)]),
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A program of `benchmarks`."""

    words: list[str]
    on: str = ""


Run = Evaluation | Profile | Inspection | Script


class Item(NamedTuple):
    """A table or a figure."""

    title: str
    runs: tuple[Run, ...] = ()
    missing: str = "the checkpoint, and the data sets as JSONL"


def speed(table: str) -> Script:
    """The timing or counting of a table of `benchmarks.papers.speed`."""
    return Script(words=["python", "-m", "benchmarks.papers.speed", table])


def averages(*words: str) -> Script:
    """Means over results, by `benchmarks.papers.averages`."""
    return Script(words=["python", "-m", "benchmarks.papers.averages", *words])


def rows(**policies: str) -> tuple[Row, ...]:
    """Rows by the names that the paper prints; an underscore is a space."""
    return tuple(Row(name.replace("_", " "), policy) for name, policy in policies.items())


def scaled(policy: str, layers: int | None, depth: int) -> str:
    """The text with layers of a model of `layers` layers in braces replaced by those of a model of `depth` layers."""
    return re.sub(r"\{(\d+)\}", lambda found: str(max(1, int(found[1]) * depth // (layers or 1))), policy)


def plan(words: list[str], config: Config) -> list[Policy]:
    """The policies that a command runs, in order, after its own parser has checked the options."""
    if words[0] != "vlkv" or words[1] not in ("eval", "inspect"):
        return []
    args: argparse.Namespace = build_parser(words[1]).parse_args(words[1:])
    return [policy_from(args, config)] if words[1] == "inspect" else policies_from(args, config)


def line(words: list[str]) -> str:
    """The command as a line for a shell, with double quotes around policies, which contain single ones."""
    return " ".join(shlex.quote(word) if "'" not in word or '"' in word else f'"{word}"' for word in words)
