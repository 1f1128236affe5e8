"""The settings that the papers state, beside those of the commands.

settings.toml was made from the papers, not from the commands. It has a table for each paper and for each of its tables
and figures. A line of it is one setting:

    keeps = ["0.5 0.1 0.05 0.01", "Table 1"]
    "Local.distance" = ["1", "Sec. 3.1", "why the commands have another value"]

with the paper's value ("" if the paper is silent), the place, and, where the commands differ, the reason. Lines of a
paper hold for all of its tables and figures. `"Row.option"` is an option of the row or rows of that name, `"*.option"`
the values of all rows that have the option, in order. `notes` are what no code can compare: the paper's sentence, its
place, and what is done here. `check` compares all of this with the commands and finds settings without a line.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.commands import Evaluation, Inspection, Item, Profile, Run, Script
from benchmarks.papers.points import SpeedTable
from vlkv.policies import Full, Policy

FILE = Path(__file__).with_name("settings.toml")


class Setting(NamedTuple):
    """A setting of a table or figure; `ours` is None for a note."""

    name: str
    paper: str
    place: str
    ours: str | None
    reason: str

    @property
    def differs(self) -> bool:
        """Whether the commands have another value."""
        return self.ours is None or self.paper != self.ours

    def __str__(self) -> str:
        """A line of the listing."""
        if self.ours is None:
            return f'paper: "{self.paper}" ({self.place}); ours: {self.reason}'
        paper = f"paper: {self.paper or 'silent'}{f' ({self.place})' if self.place else ''}"
        ours = f"ours: {self.ours or 'none'}; difference: {self.reason}" if self.differs else "ours: the same"
        return f"{self.name}; {paper}; {ours}"


def read() -> dict[str, dict[str, Any]]:
    """The content of settings.toml."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def settings(stated: Mapping[str, Any], title: str, item: Item, tables: Mapping[str, SpeedTable]) -> list[Setting]:
    """All settings of a table or figure, of which `title` is the paper's name and the item's.

    A setting of the commands that is not in the file has no place.
    """
    ours, needed = facts(item, tables)
    of_paper, own = stated.get(title.partition(",")[0], {}), stated.get(title, {})
    lines = {name: line for name, line in of_paper.items() if name in ours} | own
    notes = lines.pop("notes", [])
    found = [_setting(name, ours.get(name, ""), *line) for name, line in lines.items()]
    covered = {name.rpartition(".")[2] for name in lines if name.startswith("*.")}
    missing = [name for name in needed if name not in lines and name.rpartition(".")[2] not in covered]
    found += [Setting(name, "", "", ours[name], "") for name in missing]
    return found + [Setting("note", paper, place, None, reason) for paper, place, reason in notes]


def _setting(name: str, ours: str, paper: str, place: str, reason: str = "") -> Setting:
    return Setting(name, paper, place, ours, reason)


def faults(found: list[Setting]) -> Iterator[str]:
    """What is wrong with the settings of a table or figure."""
    for setting in found:
        name, paper, place, ours, reason = setting
        if not place and not reason:
            yield f"{name}: {ours!r} is in no line of settings.toml"
        elif setting.differs and not reason:
            yield f"{name}: the paper has {paper!r} ({place}), the commands {ours!r}"
        elif reason and not setting.differs:
            yield f"{name}: {paper!r} ({place}) does not differ any more, but there is a reason: {reason}"


# --- settings of the commands ---------------------------------------------------------------------------------------


def facts(item: Item, tables: Mapping[str, SpeedTable]) -> tuple[dict[str, str], list[str]]:
    """The settings of an item's commands as text, and the names of those that need a line."""
    found: dict[str, dict[str, None]] = {}
    needed: dict[str, None] = {}

    def add(name: str, *values: object, need: bool = True) -> None:
        found.setdefault(name, {}).update(dict.fromkeys(text for value in values if (text := written(value))))
        if need and found[name]:
            needed[name] = None

    for run in item.runs:
        _facts_of_run(run, tables, add)
        if isinstance(run, Evaluation):
            for row in run.rows:
                _facts_of_row(run, row.name, row.policy, add)
    ours = {name: (", " if name in _COMMAS else " ").join(values) for name, values in found.items()}
    return ours, list(needed)


_COMMAS = ("models", "data", "rows", "commands", "speed")


def _facts_of_run(run: Run, tables: Mapping[str, SpeedTable], add: Any) -> None:
    models, _, data = run.on.partition(": ")
    add("models", *models.split(", "))
    add("data", *data.split(", "))
    if isinstance(run, Evaluation):
        add("rows", *(row.name for row in run.rows))
        add("keeps", *run.keeps)
        add("metrics", *run.metrics, *(["judge"] if run.judged else []))
        add("new tokens", run.new_tokens)
    elif isinstance(run, Profile):
        add("profile samples", "all" if run.samples is None else run.samples)
        add("profile data", run.data)
        add("profile options", " ".join(run.options))
    elif isinstance(run, Inspection):
        add("inspect", run.what)
        add("inspected", *([] if run.policy == "full" else [run.policy]))
        add("samples", run.samples)
        add("keeps", run.keep)
    elif run.words[2] == "benchmarks.papers.speed":
        table = tables[run.words[3]]
        add("timed models", *(point.model for point in table.points))
        add("timed", *(f"{s.batch}x{s.prompt}+{s.new}" for s in (point.setting for point in table.points)))
        add("timed text", *(point.setting.text for point in table.points))
        add("timed keeps", *(point.policy.keep for point in table.points), need=False)
        add("timed rounds", table.rounds if not table.computed else None)
    else:
        add("commands", " ".join(run.words[2:]).replace("benchmarks.", ""))


def _facts_of_row(run: Evaluation, name: str, text: str, add: Any) -> None:
    """The method, the options that are not the defaults, and, for lines that ask for them, all options of a row."""
    text = re.sub(r"profile='([^']*)'", "profile=None", text) if (profile := re.search(r"profile='([^']*)'", text)) else text
    own = re.match(r"[^(]*\((.*)\)$", text)
    add(f"{name}.method", text if text.startswith("compose") else text.partition("(")[0])
    for keep in run.keeps[:1] or (None,):
        policy = run.policy(run.rows[0]._replace(policy=text), keep, _no_config)
        for option, value, default in _options(policy):
            given = option in ("keep", "budget") and own is not None and f"{option}=" in own[1]
            if option in ("keep", "budget") and not given:
                continue
            need = option != "scope" and (given or value != default) and not text.startswith("compose")
            for label in (f"{name}.{option}", f"*.{option}"):
                add(label, value, need=need and label == f"{name}.{option}")
        if profile:
            add(f"{name}.profile", profile[1])
        if not isinstance(policy, Full):
            add("scope", policy.scope)


def _options(policy: Policy) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(policy):
        yield field.name, getattr(policy, field.name), field.default


def _no_config() -> Any:
    raise AssertionError("only a profile needs the model's config")


def written(value: object) -> str:
    """A value as in settings.toml."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
