"""Pages of handwritten digits: rows of real digits on a page that is otherwise empty or covered with texture.

A page is 96 x 96 pixels, dark ink on white: a grid of 12 x 12 cells of 8 x 8 pixels, one cell per vision
token of the miniature. A digit fills one cell. The digits are those of scikit-learn's `load_digits`; the last
360 of them are shipped here (HELD_OUT.md) and never trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

GRID = 12  # cells per side
CELL = 8  # pixels per side of a cell
SIZE = GRID * CELL
HELD_OUT = 360  # digits at the end of the data set that are for testing alone
SEPARATOR = "/"
ORDINALS = ("one", "two", "three", "four", "five")
READ_PAGE = "read the page"

_TEXTURES = ("noise", "stripes", "dots", "shade", "empty")
_PAGE_SHARE = 0.4  # of the held-out questions that ask for the whole page


class Digits(NamedTuple):
    """Handwritten digits and what they say."""

    ink: Float[np.ndarray, "n 8 8"]  # 0 paper, 1 full ink
    label: Int[np.ndarray, " n"]


class Sample(NamedTuple):
    """One question about one page."""

    image: Image.Image
    question: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Page:
    """A page and what it says."""

    pixels: UInt8[np.ndarray, "96 96"]
    rows: tuple[tuple[int, ...], ...]  # the digits, from the top
    cells: tuple[int, ...]  # where they lie, in reading order: cell = 12 * y + x = index of the vision token

    @property
    def image(self) -> Image.Image:
        """The page as a picture."""
        return Image.fromarray(self.pixels).convert("RGB")

    def answer(self, row: int | None = None) -> str:
        """What one row says, or (None) the whole page."""
        rows = self.rows if row is None else self.rows[row : row + 1]
        return f" {SEPARATOR} ".join(" ".join(map(str, digits)) for digits in rows)


def question(row: int | None = None) -> str:
    """The question that `Page.answer(row)` answers; rows count from 0."""
    return READ_PAGE if row is None else f"what does row {ORDINALS[row]} say?"


@cache
def held_out_digits() -> Digits:
    """The shipped test digits."""
    with np.load(Path(__file__).parent / "held_out.npz") as file:
        return Digits(file["ink"].astype(np.float32) / 16, file["label"].astype(np.int64))


def held_out(count: int, seed: int = 0) -> Iterator[Sample]:
    """`count` questions about pages of test digits: 40 % ask for the whole page, the others for one row."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        page, row = held_out_page(rng)
        yield Sample(page.image, question(row), page.answer(row))


def held_out_page(rng: np.random.Generator) -> tuple[Page, int | None]:
    """A page of test digits, and what is asked about it: a row, or (None) the whole page."""
    page = compose(held_out_digits(), rng)
    return page, None if rng.random() < _PAGE_SHARE else int(rng.integers(len(page.rows)))


def compose(
    digits: Digits,
    rng: np.random.Generator,
    *,
    rows: tuple[int, int] = (2, 5),
    length: tuple[int, int] = (2, 5),
) -> Page:
    """A random page of between `rows[0]` and `rows[1]` rows, each of `length[0]` to `length[1]` digits."""
    ink = _background(rng)
    lines = np.sort(rng.choice(GRID, rng.integers(rows[0], rows[1] + 1), replace=False))
    text: list[tuple[int, ...]] = []
    cells: list[int] = []
    for y in lines:
        n = int(rng.integers(length[0], length[1] + 1))
        x = int(rng.integers(GRID - n + 1))
        chosen = rng.integers(len(digits.label), size=n)
        # Paper under the digits is clean: a digit that texture has made unreadable would test nothing.
        line = digits.ink[chosen].transpose(1, 0, 2).reshape(CELL, -1)
        ink[y * CELL : (y + 1) * CELL, x * CELL : (x + n) * CELL] = line
        text.append(tuple(int(label) for label in digits.label[chosen]))
        cells.extend(int(y) * GRID + np.arange(x, x + n))
    pixels = np.rint(255 * (1 - np.clip(ink, 0, 1))).astype(np.uint8)
    return Page(pixels, tuple(text), tuple(int(cell) for cell in cells))


def _background(rng: np.random.Generator) -> Float[np.ndarray, "96 96"]:
    """Patches of texture and a few long scratches; about half of the page stays empty."""
    ink = np.zeros((SIZE, SIZE), np.float32)
    for _ in range(rng.integers(1, 6)):
        height, width = int(rng.integers(1, 6)) * CELL, int(rng.integers(2, 9)) * CELL
        y, x = rng.integers(SIZE - height + 1), rng.integers(SIZE - width + 1)
        patch = ink[y : y + height, x : x + width]
        patch[:] = _texture(str(rng.choice(_TEXTURES)), height, width, rng) * rng.uniform(0.3, 1.0)
    steps = np.arange(2 * SIZE) / 2
    for _ in range(rng.integers(0, 4)):
        angle, strength = rng.uniform(0, np.pi), rng.uniform(0.3, 0.9)
        y = (rng.uniform(0, SIZE) + (steps - SIZE / 2) * np.sin(angle)).astype(int)
        x = (rng.uniform(0, SIZE) + (steps - SIZE / 2) * np.cos(angle)).astype(int)
        inside = (y >= 0) & (y < SIZE) & (x >= 0) & (x < SIZE)
        ink[y[inside], x[inside]] = strength
    return ink


def _texture(kind: str, height: int, width: int, rng: np.random.Generator) -> Float[np.ndarray, "h w"]:
    y, x = np.mgrid[:height, :width].astype(np.float32)
    if kind == "noise":
        return rng.random((height, width), np.float32)
    if kind == "stripes":
        a, b = rng.uniform(-1.5, 1.5, 2)
        return (np.sin(a * y + b * x) > rng.uniform(-0.5, 0.5)).astype(np.float32)
    if kind == "dots":
        step = int(rng.integers(2, 5))
        return ((y % step == 0) & (x % step == 0)).astype(np.float32)
    if kind == "shade":
        return (x / width if rng.random() < 0.5 else y / height).astype(np.float32)
    return np.zeros((height, width), np.float32)
