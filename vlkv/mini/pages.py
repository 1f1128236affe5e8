"""Makes pages of handwritten digits for the demo model: ledger pages and digit pages, with questions and answers.

A page has 192 x 192 pixels, with dark ink on white: a grid of 24 x 24 cells of 8 x 8 pixels, one cell per vision token.
A digit fills one cell. Other cells are empty or have a texture.

- A **ledger page** has 4 to 10 entries. An entry is a tag (one digit, white on black, different for all entries of a
  page) and a value of 3 to 6 digits. All values of a page are written to the right of their tags, or all below them.
  Question: "what does 4 say?".
- A **digit page** has 2 to 5 rows of 2 to 5 digits. Questions: "what does row two say?", "read the page".

The digits are those of scikit-learn's `load_digits`. The last 360 of them are shipped here (HELD_OUT.md); training
never sees them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8
from PIL import Image

GRID = 24  # cells per side
CELL = 8  # pixels per side of a cell
SIZE = GRID * CELL
HELD_OUT = 360  # digits at the end of the data set that are used only for testing
SEPARATOR = "/"
ORDINALS = ("one", "two", "three", "four", "five")
READ_PAGE = "read the page"
SHAPES = ("right", "below")  # position of a ledger page's values relative to their tags

_TEXTURES = ("noise", "stripes", "dots", "shade", "empty")
_PAGE_SHARE = 0.4  # of the held-out questions about digit pages that ask for the whole page


class Digits(NamedTuple):
    """Images of handwritten digits and their labels."""

    ink: Float[np.ndarray, "n 8 8"]  # 0 paper, 1 full ink
    label: Int[np.ndarray, " n"]


class Entry(NamedTuple):
    """A question about a page, and its answer."""

    question: str
    answer: str
    cells: tuple[int, ...]  # cells of the digits; cell = 24 * y + x = index of the vision token
    end: tuple[int, ...] = ()  # the cell after a ledger page's value, which shows that it ends

    @property
    def evidence(self) -> tuple[int, ...]:
        """The vision tokens that the answer needs."""
        return self.cells + self.end


class Sample(NamedTuple):
    """One question about one page."""

    image: Image.Image
    question: str
    answer: str
    evidence: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Page:
    """A page and all questions about it."""

    pixels: UInt8[np.ndarray, "192 192"]
    entries: tuple[Entry, ...]

    @property
    def image(self) -> Image.Image:
        """The page as an image."""
        return Image.fromarray(self.pixels).convert("RGB")

    @property
    def cells(self) -> tuple[int, ...]:
        """All cells with digits, in increasing order."""
        return tuple(sorted({cell for entry in self.entries for cell in entry.cells}))


@cache
def held_out_digits() -> Digits:
    """The shipped test digits."""
    with np.load(Path(__file__).parent / "held_out.npz") as file:
        return Digits(file["ink"].astype(np.float32) / 16, file["label"].astype(np.int64))


def held_out(count: int, seed: int = 0, kind: str = "ledger") -> Iterator[Sample]:
    """Yields `count` questions, each about a new page of test digits; the same seed gives the same pages.

    `kind` is a name of `KINDS`. 40 % of the questions about digit pages ask for the whole page.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        page, entry = held_out_page(rng, kind)
        yield Sample(page.image, entry.question, entry.answer, entry.evidence)


def held_out_page(rng: np.random.Generator, kind: str = "ledger") -> tuple[Page, Entry]:
    """A page of test digits, and the entry that the question is about."""
    page = KINDS[kind](held_out_digits(), rng)
    if page.entries[0].question == READ_PAGE:
        chosen = 0 if rng.random() < _PAGE_SHARE else int(rng.integers(1, len(page.entries)))
    else:
        chosen = int(rng.integers(len(page.entries)))
    return page, page.entries[chosen]


def held_out_set(rng: np.random.Generator, images: int = 3) -> tuple[list[Page], int, Entry]:
    """Several ledger pages of test digits with different tags, the index of one of them, and one of its entries."""
    tags = np.array_split(rng.permutation(10), images)
    shown = [ledger_page(held_out_digits(), rng, entries=(len(x), len(x)), tags=x.tolist()) for x in tags]
    chosen = int(rng.integers(images))
    return shown, chosen, shown[chosen].entries[rng.integers(len(shown[chosen].entries))]


def ledger_page(
    digits: Digits,
    rng: np.random.Generator,
    *,
    shape: str | None = None,
    entries: tuple[int, int] = (4, 10),
    length: tuple[int, int] = (3, 6),
    tags: Sequence[int] = range(10),
) -> Page:
    """A random page of tags and values.

    `shape` is the position of values relative to their tags, "right" or "below"; None: one of the two at random.
    `entries` and `length` are the smallest and largest number of entries, at most one per tag, and of a value's digits.
    """
    down = (shape or SHAPES[rng.integers(2)]) == "below"
    ink = _background(rng)
    used = np.zeros((GRID, GRID), bool)  # [line, cell of the line]; a line is a column if `down`, otherwise a row
    count = min(int(rng.integers(entries[0], entries[1] + 1)), len(tags))
    asked = []
    for tag in rng.permutation(np.asarray(tags))[:count]:
        n = int(rng.integers(length[0], length[1] + 1))
        line, start = _free_place(used, n + 1, rng)
        used[line, start : start + n + 1] = True
        value = rng.integers(len(digits.label), size=n)
        glyphs = [1 - digits.ink[rng.choice(np.flatnonzero(digits.label == tag))], *digits.ink[value]]
        places = [(start + i, line) if down else (line, start + i) for i in range(n + 1)]
        written = _write(ink, glyphs, places)
        after = start + n + 1
        end = () if after == GRID else (after * GRID + line if down else line * GRID + after,)
        asked.append(Entry(f"what does {tag} say?", _spoken(digits.label[value]), written, end))
    return Page(_pixels(ink), tuple(asked))


def digit_page(
    digits: Digits, rng: np.random.Generator, *, rows: tuple[int, int] = (2, 5), length: tuple[int, int] = (2, 5)
) -> Page:
    """A random page of `rows[0]` to `rows[1]` rows, each with `length[0]` to `length[1]` digits.

    The first entry is the whole page, the others are its rows from the top.
    """
    ink = _background(rng)
    asked = []
    for i, y in enumerate(np.sort(rng.choice(GRID, rng.integers(rows[0], rows[1] + 1), replace=False))):
        n = int(rng.integers(length[0], length[1] + 1))
        x = int(rng.integers(GRID - n + 1))
        chosen = rng.integers(len(digits.label), size=n)
        cells = _write(ink, list(digits.ink[chosen]), [(int(y), x + j) for j in range(n)])
        asked.append(Entry(f"what does row {ORDINALS[i]} say?", _spoken(digits.label[chosen]), cells))
    everything = f" {SEPARATOR} ".join(row.answer for row in asked)
    page = Entry(READ_PAGE, everything, tuple(cell for row in asked for cell in row.cells))
    return Page(_pixels(ink), (page, *asked))


KINDS: dict[str, Callable[[Digits, np.random.Generator], Page]] = {
    "ledger": ledger_page,
    "right": lambda digits, rng: ledger_page(digits, rng, shape="right"),
    "below": lambda digits, rng: ledger_page(digits, rng, shape="below"),
    "digits": digit_page,
}


def _free_place(used: np.ndarray, length: int, rng: np.random.Generator) -> tuple[int, int]:
    """A random line and start of `length` unused cells, with no used cell directly before or after them."""
    while True:
        line, start = int(rng.integers(GRID)), int(rng.integers(GRID - length + 1))
        if not used[line, max(0, start - 1) : start + length + 1].any():
            return line, start


def _write(ink: np.ndarray, glyphs: Sequence[np.ndarray], places: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Writes one glyph into each cell (y, x) and returns the indices of the cells.

    A glyph replaces the texture of its cell, because an unreadable digit would not test anything.
    """
    for glyph, (y, x) in zip(glyphs, places, strict=True):
        ink[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL] = glyph
    return tuple(y * GRID + x for y, x in places)


def _spoken(labels: Int[np.ndarray, " n"]) -> str:
    return " ".join(str(int(label)) for label in labels)


def _pixels(ink: Float[np.ndarray, "h w"]) -> UInt8[np.ndarray, "h w"]:
    return np.rint(255 * (1 - np.clip(ink, 0, 1))).astype(np.uint8)


def _background(rng: np.random.Generator) -> Float[np.ndarray, "192 192"]:
    """Blocks of texture and a few long lines; about half of the page is empty."""
    ink = np.zeros((SIZE, SIZE), np.float32)
    for _ in range(rng.integers(3, 14)):
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
