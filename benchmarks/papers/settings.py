"""The settings that the papers state, beside those of the commands.

settings.toml was made from the papers, not from the commands. It has a table for each paper and for each of its tables
and figures. A line of it is one setting:

    keeps = ["0.5 0.1 0.05 0.01", "Table 1"]
    "Local.distance" = ["1", "Sec. 3.1", "why the commands have another value"]

with the paper's value ("" if the paper is silent), the place, and, where the commands differ, the reason. Lines of a
paper hold for all of its tables and figures that have such a setting. `"Row.option"` is an option of the rows of that
name, `"*.option"` the values of all rows that have the option, in order; `"*.method"` names each method once. `notes`
are what no code can compare: the paper's sentence, its place, and what is done here. `python -m benchmarks.papers
--check` compares all of this with the commands, and finds settings of the commands that are in no line.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.tables import Evaluation, Inspection, Item, Profile, Row, Run, no_config, speed_tables
from vlkv.cli import build_parser
from vlkv.policies import Full

_COMMAS = ("models", "data", "rows", "commands")  # their values are separated by commas, others by spaces
_UNORDERED = ("models", "data", "metrics", "scope")
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
        if self.ours is None or self.name not in _UNORDERED:
            return self.paper != self.ours
        separator = ", " if self.name in _COMMAS else None
        return {*self.paper.split(separator)} != {*self.ours.split(separator)}

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


def settings(stated: Mapping[str, Any], item: Item) -> list[Setting]:
    """The settings of a table or figure in the paper, beside those of the commands.

    A setting of the commands that is not in the file has no place.
    """
    ours, needed = facts(item)
    of_paper, of_item = stated.get(item.paper, {}), stated.get(item.name, {})
    lines = {name: line for name, line in (of_paper | of_item).items() if name in ours or name in of_item}
    notes = [*of_paper.get("notes", []), *lines.pop("notes", [])]
    listed = [
        Setting(name, paper, place, ours.get(name, ""), reason)
        for name, (paper, place, reason) in ((name, (*line, "")[:3]) for name, line in lines.items())
    ]
    missing = [name for name in needed if not {name, f"*.{name.rpartition('.')[2]}"} & lines.keys()]
    listed += [Setting(name, "", "", ours[name], "") for name in missing]
    return listed + [Setting("note", paper, place, None, reason) for paper, place, reason in notes]


def faults(listed: list[Setting]) -> Iterator[str]:
    """What is wrong with the settings of a table or figure."""
    for setting in listed:
        name, paper, place, ours, reason = setting
        if not place and not reason:
            yield f"{name}: {ours!r} is in no line of settings.toml"
        elif setting.differs and not reason:
            yield f"{name}: the paper has {paper!r} ({place}), the commands {ours!r}"
        elif reason and not setting.differs:
            yield f"{name}: {paper!r} ({place}) does not differ any more, but there is a reason: {reason}"


# --- settings of the commands ---------------------------------------------------------------------------------------


def facts(item: Item) -> tuple[dict[str, str], list[str]]:
    """The settings of an item's commands as text, and the names of those that need a line."""
    texts: dict[str, dict[str, None]] = {}
    needed: dict[str, None] = {}
    seen: dict[tuple[str, str, str], None] = {}  # option, row and value

    def add(name: str, *values: object, need: bool = True) -> None:
        texts.setdefault(name, {}).update(dict.fromkeys(text for value in values if (text := written(value))))
        if need and texts[name]:
            needed[name] = None

    for run in item.runs:
        _facts_of_run(run, add)
        if isinstance(run, Evaluation):
            for row in run.rows:
                _facts_of_row(run, row.name, row.policy, add, seen)
    ours = {name: (", " if name in _COMMAS else " ").join(values) for name, values in texts.items()}
    if "profile keeps" in ours and ours["profile keeps"] == ours.get("keeps"):
        ours["profile keeps"] = "those of the rows"
    methods = [*dict.fromkeys(ours[name] for name in ours if name.endswith(".method") and ours[name] != "full")]
    by_option = {name: " ".join(value for option, _, value in seen if option == name) for name, _, _ in seen}
    return ours | by_option | {"*.method": " ".join(methods)}, list(needed)


def _facts_of_run(run: Run, add: Any) -> None:
    models, _, data = run.on.partition(": ")
    add("models", *models.split(", "))
    add("data", *data.split(", "))
    if isinstance(run, Evaluation):
        add("rows", *(row.name for row in run.rows))
        add("keeps", *run.keeps)
        add("metrics", *run.metrics, *(["judge"] if run.judged else []))
        add("new tokens", run.new_tokens or _default_limit())
    elif isinstance(run, Profile):
        add("profile samples", run.samples)
        add("profile data", run.data)
        add("profile options", " ".join(run.options))
        add("profile keeps", *run.keeps)
    elif isinstance(run, Inspection):
        add("inspect", run.what)
        add("inspected", *([] if run.policy == "full" else [run.policy]))
        add("samples", run.samples)
        add("keeps", run.keep)
    elif run.words[2] == "benchmarks.papers.speed":
        table = speed_tables()[run.words[3]]
        add("timed models", *(point.model for point in table.points))
        add("timed", *(f"{s.batch}x{s.prompt}+{s.new}" for s in (point.setting for point in table.points)))
        add("timed text", *(point.setting.text for point in table.points))
        keeps = (point.policy.keep for point in table.points if not isinstance(point.policy, Full))
        add("timed keeps", *keeps, need=False)
        add("timed rounds", table.rounds if not table.computed else None)
    else:
        add("commands", " ".join(run.words[2:]).replace("benchmarks.", ""))


def _facts_of_row(run: Evaluation, name: str, text: str, add: Any, seen: dict[tuple[str, str, str], None]) -> None:
    """The method of a row, its options, of which those that are not the defaults need a line, and its scope."""
    profile, text = re.search(r"profile='([^']*)'", text), re.sub(r"profile='[^']*'", "profile=None", text)
    composed = text.startswith("compose")
    policy = run.policy(Row(name, text), (run.keeps or (None,))[0], no_config)
    add(f"{name}.method", text if composed else text.partition("(")[0])
    if not isinstance(policy, Full):
        add("scope", policy.scope)
    for field in dataclasses.fields(policy):
        given = f"{field.name}=" in text
        if composed or (field.name in ("keep", "budget") and not given):
            continue
        value = profile[1] if profile and field.name == "profile" else getattr(policy, field.name)
        add(f"{name}.{field.name}", "none" if value is None else value, need=given)
        seen[f"*.{field.name}", name, written("none" if value is None else value)] = None


@functools.cache
def _default_limit() -> int:
    args = build_parser("eval").parse_args(["eval", "data.jsonl", "--model", "mini", "--out", "out"])
    return int(args.max_new_tokens)


def written(value: object) -> str:
    """A value as in settings.toml."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
