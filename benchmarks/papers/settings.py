"""The settings that the papers state, beside those of the commands.

settings.toml was made from the papers, not from the commands. It has a table for each paper and for each of its tables
and figures. A line of it is one setting:

    keeps = ["0.5 0.1 0.05 0.01", "Table 1"]
    "Local.distance" = ["1", "Sec. 3.1", "why the commands have another value"]

with the paper's value ("" if the paper is silent), the place, and, where the commands differ, the reason. Lines of a
paper hold for all of its tables and figures that have such a setting. `"Row.option"` is an option of the rows of that
name, `"method.option"` that of all rows and timed or inspected policies with the method, whatever their names, and
`"*.option"` the values of all rows that have the option, in order; `"*.method"` names each method once.

A line with another name, such as `hardware`, says in place of the reason what is done here, which no code can compare.
Of a paper it has a fourth field: the tables and figures for which it holds, or settings that these have:

    ChatQA = ["ChatQA [26]", "Sec. 4.1", "[26] in the references is ChartQA", ["timed", "Table 1"]]

`notes` are further such lines, of a paper's sentence.

`python -m benchmarks.papers --check` compares all of this with the commands, and finds settings of the commands that
are in no line.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.speed import DEVIATIONS
from benchmarks.papers.tables import (
    Evaluation,
    Inspection,
    Item,
    Profile,
    Row,
    Run,
    Script,
    SpeedTable,
    no_config,
    plan,
    speed_tables,
)
from vlkv.cli import build_parser
from vlkv.policies import Full, Policy, text_of

_PROFILE = re.compile(r"profile='([^']*)'")
_COMMAS = ("models", "data", "rows", "commands")  # their values are separated by commas, others by spaces
_UNORDERED = ("models", "data", "metrics", "scope")
# What holds for every run of a kind. It is listed where a line of settings.toml has the paper's value.
_HARDWARE = "the user's"
_EVALUATED = {
    "hardware": _HARDWARE,
    "prompts": "the user's",
    "questions": "all",
    "scoring": "vlkv eval's",
    "sampling": "greedy",
    "precision": "the checkpoint's",
    "vision tokens": "the checkpoint's",
}
_TIMED = {
    "hardware": _HARDWARE,
    "timed weights": "random",
    "timed precision": "bfloat16",
    "timed part": "decoder",
    "timed warm-up": "1",
}
FILE = Path(__file__).with_name("settings.toml")


class Setting(NamedTuple):
    """A setting of a table or figure; `ours` is None if no code can compare it, and `reason` says what is done here."""

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
        paper = f"paper: {self.paper or 'silent'}{f' ({self.place})' if self.place else ''}"
        if self.name == "note":
            return f'paper: "{self.paper}" ({self.place}); ours: {self.reason}'
        if self.ours is None:
            return f"{self.name}; {paper}; ours: {self.reason}"
        ours = f"ours: {self.ours or 'none'}; difference: {self.reason}" if self.differs else "ours: the same"
        return f"{self.name}; {paper}; {ours}"


def read() -> dict[str, dict[str, Any]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def settings(stated: Mapping[str, Any], item: Item) -> list[Setting]:
    """The settings of a table or figure in the paper, beside those of the commands.

    A setting of the commands that is not in the file has no place.
    """
    ours, needed = facts(item)
    of_paper, of_item = dict(stated.get(item.paper, {})), dict(stated.get(item.name, {}))
    notes = of_paper.pop("notes", []) + of_item.pop("notes", [])
    here = {item.what, *ours}
    methods = {value for name, value in ours.items() if name.endswith(".method")}

    def holds(name: str, line: list[Any]) -> bool:
        """Whether a line of the paper holds here. One about a method gives way to one about all rows of the table."""
        method, _, option = name.rpartition(".")
        replaced = method in methods and f"*.{option}" in of_item
        return not replaced and not here.isdisjoint(line[3] if len(line) > 3 else [name])

    lines = {name: line for name, line in of_paper.items() if holds(name, line)} | of_item
    listed = [
        Setting(name, paper, place, ours.get(name), reason)
        for name, (paper, place, reason) in ((name, (*line, "")[:3]) for name, line in lines.items())
    ]
    missing = [name for name in needed if not {name, *_also(name, ours)} & lines.keys()]
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


def unknown(stated: Mapping[str, Any], listed: Sequence[Item]) -> Iterator[str]:
    """Tables, figures and settings in fourth fields that these tables and figures do not have."""
    for paper in dict.fromkeys(item.paper for item in listed):
        known = {name for item in listed if item.paper == paper for name in (item.what, *facts(item)[0])}
        for name, line in stated.get(paper, {}).items():
            wrong = sorted(set(line[3] if len(line) > 3 and name != "notes" else ()) - known)
            yield from (f"{paper}, {name}: no table, figure or setting {each!r}" for each in wrong)


def _also(name: str, ours: Mapping[str, str]) -> tuple[str, str]:
    """Other names of an option of a row: that of its method, and that of all rows."""
    row, _, option = name.rpartition(".")
    return f"{ours.get(f'{row}.method')}.{option}", f"*.{option}"


# --- settings of the commands ---------------------------------------------------------------------------------------


def facts(item: Item) -> tuple[dict[str, str], list[str]]:
    """The settings of an item's commands as text, and the names of those that need a line."""
    texts: dict[str, dict[str, None]] = {}
    needed: dict[str, None] = {}
    seen: dict[tuple[str, str, str], None] = {}  # option, row and value

    def add(name: str, *values: object, need: bool = True) -> None:
        if given := dict.fromkeys(text for value in values if (text := written(value))):
            texts.setdefault(name, {}).update(given)
            needed.update({name: None} if need else {})

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
        add("new tokens", run.new_tokens or _default("max_new_tokens"))
        add("temperature", *([_default("temperature")] if "self-rouge-l" in run.metrics else []))
        for name, value in {**_EVALUATED, "seed": _default("seed"), "batch": run.batch}.items():
            add(name, value, need=False)
    elif isinstance(run, Profile):
        add("profile samples", run.samples)
        add("profile data", run.data)
        add("profile options", " ".join(run.options))
        add("profile keeps", *run.keeps)
    elif isinstance(run, Inspection):
        add("inspect", run.what)
        add("inspected", *([] if run.policy == "full" else [run.policy]))
        add("samples", run.samples or "all", need=run.samples is not None)
        add("hardware", _HARDWARE, need=False)
        add("keeps", run.keep)
        add("new tokens", run.new_tokens)
        if run.policy != "full":
            (policy,) = plan([_PROFILE.sub("profile=None", word) for word in run.words], no_config)
            add("scope", policy.scope)
            _facts_of_policy(run.policy.partition("(")[0], policy, add)
    elif (table := timed_table(run)) is not None:
        add("timed models", *(point.model for point in table.points))
        add("timed", *(f"{s.batch}x{s.prompt}+{s.new}" for s in (point.setting for point in table.points)))
        add("timed text", *(point.setting.text for point in table.points))
        keeps = (point.policy.keep for point in table.points if not isinstance(point.policy, Full))
        add("timed keeps", *keeps, need=False)
        texts = (re.sub(r"keep=[0-9.]+(, )?|\(keep=[0-9.]+\)", "", text_of(point.policy)) for point in table.points)
        add("timed policies", *(text.replace(" ", "") for text in texts), need=False)
        for point in table.points:
            _facts_of_policy(text_of(point.policy).partition("(")[0], point.policy, add)
        timed = not table.computed or "--timed" in run.words
        add("timed figures", *table.shown(timed=timed), need=False)
        if timed:
            add("timed rounds", table.rounds)
            averaged = any(figure in DEVIATIONS for figure in table.shown(timed=True))
            statistic = "mean and deviation" if averaged else "median"
            for name, value in {**_TIMED, "timed statistic": statistic}.items():
                add(name, value, need=False)
    else:
        add("commands", " ".join(run.words[2:]).replace("benchmarks.", ""))


def _facts_of_row(run: Evaluation, name: str, text: str, add: Any, seen: dict[tuple[str, str, str], None]) -> None:
    """The method of a row, its options, of which those that are not the defaults need a line, and its scope."""
    given_text, profile, text = text, _PROFILE.search(text), _PROFILE.sub("profile=None", text)
    composed = text.startswith("compose")
    policy = run.policy(Row(name, text), (run.keeps or (None,))[0], no_config)
    add(f"{name}.method", given_text if composed else text.partition("(")[0])
    if not isinstance(policy, Full):
        add("scope", policy.scope)
    if composed and profile:
        seen["*.profile", name, profile[1]] = None
    for field in dataclasses.fields(policy):
        given = f"{field.name}=" in text
        if composed or (field.name in ("keep", "budget") and not given):
            continue
        value = profile[1] if profile and field.name == "profile" else getattr(policy, field.name)
        add(f"{name}.{field.name}", "none" if value is None else value, need=given)
        add(f"{text.partition('(')[0]}.{field.name}", "none" if value is None else value, need=False)
        seen[f"*.{field.name}", name, written("none" if value is None else value)] = None


def _facts_of_policy(method: str, policy: Policy, add: Any) -> None:
    """The options of a policy that is timed or inspected, but for keep and scope, which have their own lines."""
    for field in dataclasses.fields(policy):
        if field.name not in ("keep", "budget", "scope"):
            value = getattr(policy, field.name)
            add(f"{method}.{field.name}", "none" if value is None else value, need=False)


@functools.cache
def _default(option: str) -> float:
    """The default of an option of `vlkv eval`."""
    args = build_parser("eval").parse_args(["eval", "data.jsonl", "--model", "mini", "--out", "out"])
    return float(getattr(args, option))


def timed_table(run: Run) -> SpeedTable | None:
    """The published table that a run times or counts, if it does."""
    timed = isinstance(run, Script) and "benchmarks.papers.speed" in run.words
    return speed_tables()[run.words[3]] if timed else None


def written(value: object) -> str:
    """A value as in settings.toml."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
