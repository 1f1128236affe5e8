"""Pages with questions: training pages made from their numbers, and the committed held-out questions."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from benchmarks.documents.drawing import draw
from benchmarks.documents.kinds import KINDS, Sheet
from benchmarks.documents.values import Values
from vlkv.errors import InputError

SIZES = (128, 256, 384, 512)  # pixels per side
HELD_OUT = Path(__file__).parent / "held_out.json"  # {size: [[question, answer], ...]}
COUNT = 200  # held-out questions of each size


class Plan(NamedTuple):
    """What is on a page."""

    kind: str  # a name of `KINDS`
    sheet: Sheet
    lines: int  # that fit on the page
    chosen: int  # index of the question to ask if only one is asked


class Page(NamedTuple):
    """A page and all questions about it, each with its answer."""

    kind: str
    pixels: UInt8[np.ndarray, "size size"]
    questions: tuple[tuple[str, str], ...]


def plan(number: int, size: int, *, held_out: bool = False) -> Plan:
    """What is on the page with this number; arguments as in `page`."""
    rng = np.random.default_rng([int(held_out), number, size])
    kind = list(KINDS)[number % len(KINDS)]
    # Pixels per line. Many pages have small text, and some so large a text that only six lines fit.
    smallest = 13 * (size / 128) ** 0.15
    line = smallest * (size / smallest / 7) ** (rng.uniform() ** 1.5)
    lines, columns = int(size * 0.92 / line), int(size / line / 0.42)
    sheet = KINDS[kind](Values(rng, held_out), lines, columns)
    return Plan(kind, sheet, lines, int(rng.integers(len(sheet.questions))))


def page(number: int, size: int, *, held_out: bool = False) -> Page:
    """The page with this number.

    Args:
        number: any number from 0 on.
        size: pixels per side. Larger pages have more and smaller text.
        held_out: from the held-out set instead of the training set.
    """
    made = plan(number, size, held_out=held_out)
    rng = np.random.default_rng([int(held_out), number, size, 1])  # so that the text does not depend on the drawing
    pixels = draw(made.sheet.rows, size, made.lines, made.sheet.width, rng)
    return Page(made.kind, pixels, made.sheet.questions)


@cache
def held_out(size: int) -> tuple[tuple[str, str], ...]:
    """The committed held-out questions and answers of one size; number i is about `page(i, size, held_out=True)`.

    Raises:
        InputError: there are no questions of this size.
    """
    found = json.loads(HELD_OUT.read_text()).get(str(size))
    if found is None:
        raise InputError(f"no held-out questions of {size} pixels: sizes are {', '.join(map(str, SIZES))}")
    return tuple((question, answer) for question, answer in found)


def make_questions(size: int, count: int = COUNT) -> list[list[str]]:
    """The held-out questions and answers as the generator makes them, in the form of `HELD_OUT`."""
    plans = (plan(number, size, held_out=True) for number in range(count))
    return [list(made.sheet.questions[made.chosen]) for made in plans]


def export(folder: Path, size: int) -> str:
    """Writes the held-out pages of one size, and `questions.jsonl`, which `vlkv eval` reads; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, (question, answer) in enumerate(held_out(size)):
        shown, name = page(number, size, held_out=True), f"{number:03}.png"
        Image.fromarray(shown.pixels).save(folder / name)
        rows.append(
            {"id": str(number), "image": name, "question": question, "answers": [answer], "dataset": shown.kind}
        )
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder / "questions.jsonl")
