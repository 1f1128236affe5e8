"""Measured series, a number or a list of numbers for every sample, which are written after each batch, and the claims.

Evaluates the claims of claims.toml with the committed results, and writes them into docs/papers.md.

A claim has `checks`: [left, relation, right] or, with a margin, [left, relation, right, margin]. Left is a series;
right is a series of the same samples or a number. Relations are about the mean difference left - right and its 95 %
interval:

    >  or <    the whole interval is on this side of 0
    =          the whole interval is within the margin
    >= or <=   the whole interval is on this side of the margin, that is, worse by at most the margin

The name of a series is EXPERIMENT/NAME. Of series with a list for every sample, `[a:b]` takes the mean of a part of it,
`@spread` its standard deviation, and `@deviation` its mean absolute difference from the mean of all samples. "A - B" is
the difference of two series.
"""

import functools
import json
import re
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlkv.files import plain, replacing
from vlkv.tools.benching import machine

CLAIMS = Path(__file__).with_name("claims.toml")
FOLDER = Path(__file__).parents[1] / "results" / "findings"


@functools.cache
def declared() -> dict[str, Any]:
    return tomllib.loads(CLAIMS.read_text())


class Series:
    """The series of one file, by the name of their experiment and their own."""

    def __init__(self, path: Path, seconds: float = float("inf")) -> None:
        self.path, self.end = path, time.monotonic() + seconds
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"series": {}}

    def holds(self, name: str, start: int) -> bool:
        """Whether the series has the batch that begins with this sample."""
        return len(self.content["series"].get(name, ())) > start

    def todo(self, name: str, count: int, batch: int) -> Iterator[int]:
        """The first sample of each batch that is not measured yet; `name` is a series that every batch adds to.

        After `seconds`, no further batch begins.
        """
        done = len(self.content["series"].get(name, ()))
        for start in range(done, count, batch):
            if time.monotonic() > self.end:
                return
            print(f"{self.path.name}: {start} of {count}", flush=True)
            yield start

    def add(self, experiment: str, measured: Mapping[str, Any], start: int) -> None:
        """Adds a batch and writes the file."""
        for name, values in measured.items():
            held = self.content["series"].setdefault(f"{experiment}/{name}", [])
            held[start:] = plain(np.round(np.asarray(values, np.float64), 4))
        self.content["machine"] = machine.describe()
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(held)}" for name, held in self.content["series"].items())
        with replacing(self.path) as partial:
            partial.write_text(f'{{"machine": {json.dumps(self.content["machine"])},\n"series": {{\n{lines}\n}}}}\n')


PAGE = Path(__file__).parents[2] / "docs" / "papers.md"
_MARKED = re.compile(r"(?<=<!-- findings -->\n).*?(?=\n<!-- /findings -->)", re.DOTALL)
_UNDECIDED = "cannot be tested here"
_NORMAL = 1.959964


class Check(NamedTuple):
    """A comparison that a claim implies."""

    left: str
    relation: str
    right: str | float
    margin: float = 0.0


class Outcome(NamedTuple):
    """A check with its numbers; `shown` is None if the interval decides nothing."""

    check: Check
    samples: int
    values: tuple[float, float]
    difference: tuple[float, float, float]  # with its interval
    shown: bool | None


@functools.cache
def results() -> Mapping[str, np.ndarray]:
    samples: dict[str, Any] = {}
    for path in sorted(FOLDER.glob("*.json")):
        samples |= json.loads(path.read_text()).get("series", {})
    for row in json.loads((FOLDER.parent / "quality.json").read_text())["rows"]:
        if row["seed"] == 0:
            samples[f"{row['section']}/{row['name']} {row['bytes']:g}"] = [int(x) for x in row["right"]]
    rows = [json.loads(line) for line in (FOLDER.parent / "real.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row.get("protocol") == "question" and row["engine"] == "vlkv"]
    full = {(row["task"], row["number"]): row["tokens"][0] for row in rows if row["method"] == "full"}
    for row in rows:
        samples.setdefault(f"real/{row['method']}", []).append(row["score"])
        same = row["tokens"][0] == full[row["task"], row["number"]]
        samples.setdefault(f"real/first token, {row['method']}", []).append(same)
    return {name: np.asarray(values, np.float64) for name, values in samples.items()}


def series(name: str) -> np.ndarray:
    """One number for every sample."""
    if " - " in name:
        minuend, subtrahend = map(series, name.split(" - "))
        return minuend - subtrahend
    base, part, operation = re.fullmatch(r"([^\[@]+)(\[[-\d:]+\])?(?:@(\w+))?", name).groups()  # type: ignore[union-attr]
    values = results()[base]
    if part:
        first, colon, last = part[1:-1].partition(":")
        values = values[:, slice(int(first or 0), int(last) if last else None) if colon else [int(first)]]
    if operation == "spread":
        return values.std(axis=1)
    if operation == "deviation":
        return np.abs(values - values.mean(axis=0)).mean(axis=1)
    return values.mean(axis=1) if values.ndim == 2 else values


def evaluate(check: Check) -> Outcome:
    """The numbers of a check."""
    left = series(check.left)
    right = np.full_like(left, check.right) if isinstance(check.right, int | float) else series(check.right)
    known = ~(np.isnan(left) | np.isnan(right))
    left, right = left[known], right[known]
    difference = left - right
    middle, margin = difference.mean(), _NORMAL * difference.std(ddof=1) / np.sqrt(len(difference))
    low, high, allowed = middle - margin, middle + margin, check.margin
    shown, against = {
        ">": (low > 0, high <= 0),
        "<": (high < 0, low >= 0),
        "=": (-allowed <= low and high <= allowed, low > allowed or high < -allowed),
        ">=": (low >= -allowed, high < -allowed),
        "<=": (high <= allowed, low > allowed),
    }[check.relation]
    decided = True if shown else False if against else None
    return Outcome(check, len(difference), (left.mean(), right.mean()), (middle, low, high), decided)


def verdict(outcomes: list[Outcome]) -> str:
    """`holds` if all checks are shown, `does not hold` if none is and at least one is contradicted."""
    shown = [outcome.shown for outcome in outcomes]
    if all(shown):
        return "holds"
    if any(shown):
        return "holds in part"
    return "does not hold" if False in shown else _UNDECIDED


def outcomes() -> list[tuple[dict[str, Any], list[Outcome]]]:
    return [(claim, [evaluate(Check(*check)) for check in claim["checks"]]) for claim in declared()["claims"]]


def table() -> str:
    """The text between the marks of the page."""
    judged = outcomes()
    blocks = [line for n, pair in enumerate(judged, 1) for line in _block(n, *pair)]
    return "\n".join([_machines(), *summary(judged), *blocks])


def _machines() -> str:
    """Where the results of this package were measured."""
    places = []
    for path in sorted(FOLDER.glob("*.json")):
        about = json.loads(path.read_text())["machine"]
        names = ("device", "cores", "python", "jax", "numpy", "commit")
        places.append(f"`{path.stem}` on {about['processor']} ({', '.join(f'{n} {about[n]}' for n in names)})")
    return f"Measured {'; '.join(places)}. The files of the others name theirs.\n"


def summary(judged: list[tuple[dict[str, Any], list[Outcome]]]) -> Iterator[str]:
    verdicts = [verdict(outcome) for _, outcome in judged]
    tested = [(claim, v) for (claim, _), v in zip(judged, verdicts, strict=True) if v != _UNDECIDED]
    published = sum(claim["model"] != "demo model" for claim, _ in tested)
    kinds = ", ".join(f"{verdicts.count(v)} {v}" for v in ("holds", "holds in part", "does not hold", _UNDECIDED))
    yield f"{len(tested)} claims are tested, {published} of them on a published model: {kinds}.\n"
    yield "| | claim | paper | model | verdict |\n|---|---|---|---|---|"
    for n, ((claim, _), v) in enumerate(zip(judged, verdicts, strict=True), 1):
        anchor = re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", claim["title"].lower())).strip("-")
        link = f"[{claim['title']}](#{n}-{anchor})"
        yield f"| {n} | {link} | {claim['paper']} | {claim['model']} | {v} |"


def _block(number: int, claim: dict[str, Any], outcomes: list[Outcome]) -> Iterator[str]:
    yield f"\n### {number}. {claim['title']}\n"
    yield f"> {claim['says']} ({claim['paper']}, {claim['place']})\n"
    yield f"{claim['how']}\n"
    unit = claim.get("unit", "")
    yield f"| left | claimed | right | left{unit and f', {unit}'} | right | difference [95 %] | n | shown |"
    yield "|---|---|---|---|---|---|---|---|"
    scale, digits = (100, 1) if unit == "%" else (1, 3)
    for check, count, values, difference, shown in outcomes:
        a, b, middle, low, high = (f"{scale * x:.{digits}f}" for x in (*values, *difference))
        relation = check.relation + (f" within {scale * check.margin:g}" if check.margin else "")
        right = "" if isinstance(check.right, int | float) else _short(check.right)
        mark = {True: "yes", False: "no", None: "open"}[shown]
        yield (f"| {_short(check.left)} | {relation.replace('<', '&lt;').replace('>', '&gt;')} | {right} | {a} | {b} | "
               f"{middle} [{low}, {high}] | {count} | {mark} |")  # fmt: skip
    yield f"\n**{verdict(outcomes).capitalize()}.** {claim['why']}".rstrip()


def _short(name: str) -> str:
    """The name of a series without its experiment, and with its part and its operation in words."""
    words = [each.partition("/")[2] for each in name.split(" - ")]
    text = re.sub(r"\[([-\d:]+)\]", r", layers or steps \1", " - ".join(words))
    return text.replace("@spread", ", spread over layers").replace("@deviation", ", deviation")


def written(page: str) -> str:
    return _MARKED.sub(lambda _: table(), page)
