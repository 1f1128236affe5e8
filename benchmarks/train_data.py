"""Pages with questions and answers on which `benchmarks.train_mini` trains the demo model, as arrays of static shape.

Axes: B rows of a batch · I images of a row · V vision tokens shown per image · T tokens of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from vlkv.mini import folder, pages
from vlkv.mini.pages import Digits, Entry, Page

VISION_START = 3  # <s> user :
BLOCK = 4  # cells whose features an average-pooled grid replaces by their mean: 2 x 2


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of one training step.

    A prompt shows `images` pages with different tags, so that a question need not name the page. `pooled` replaces the
    features of every block of 2 x 2 cells by their mean, at the position of the first cell of the block.
    """

    kind: str  # "ledger" or "digits"
    images: int = 1
    pooled: bool = False


TASKS = {
    "ledger": Task("ledger"),
    "digits": Task("digits"),
    "pooled": Task("ledger", pooled=True),
    "several": Task("ledger", images=3),
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One part of the curriculum. `cells` is the number of cells that a row shows."""

    steps: int
    cells: int
    entries: tuple[int, int]  # smallest and largest number of entries of a ledger page
    questions: int  # about a ledger page; half as many about a digit page, including one about the whole page
    batch: int
    turns: tuple[str, ...]  # names of `TASKS`: the tasks of successive steps, repeated

    def shown(self, task: Task) -> int:
        """Number of cells of each image whose patches the model is given; the others are left out to train faster."""
        if task.pooled:
            return BLOCK * max(4 * self.entries[1], self.cells // BLOCK)  # an entry is in at most 4 blocks
        return self.cells // task.images


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Pages with their questions and answers, in arrays of static shape."""

    patches: Float[np.ndarray | Array, "B I V 8 8"]  # normalised grey
    cells: Int[np.ndarray | Array, "B I V"]
    tokens: Int[np.ndarray | Array, "B text"]  # the branches, concatenated
    weights: Float[np.ndarray | Array, "B text"]  # 1 where the token is part of an answer, 0 for prompts and padding


@dataclasses.dataclass(frozen=True)
class Layout:
    """The lengths of the branches of a row. Static."""

    task: Task
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, stage: Stage, task: Task) -> Layout:
        """The layout with capacity for the longest questions and answers: prompt, digits, separators and </s>."""
        if task.kind == "digits":
            return cls(task, (5 + 5 * 6, *(9 + 5,) * (stage.questions // 2 - 1)))
        return cls(task, (8 + 6,) * stage.questions)

    @property
    def positions(self) -> Int[np.ndarray, " text"]:
        """RoPE positions: every branch continues after the images."""
        start = VISION_START + self.task.images * pages.GRID**2
        return np.concatenate([start + np.arange(n) for n in self.lengths])


def training_digits() -> Digits:
    """All digits except the held-out ones. Only this function uses scikit-learn."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return Digits((data.images[: -pages.HELD_OUT] / 16).astype(np.float32), data.target[: -pages.HELD_OUT])


def vary(digits: Digits, rng: np.random.Generator) -> Digits:
    """Augments the digits: small random rotations, shears, scales, shifts, changes of brightness, and noise."""
    n = len(digits.label)
    transform = np.eye(2) + rng.normal(0, 0.1, (n, 2, 2))
    middle = (pages.CELL - 1) / 2
    pixel = np.mgrid[: pages.CELL, : pages.CELL].reshape(2, -1) - middle
    place = np.einsum("nij,jp->nip", transform, pixel) + rng.normal(0, 0.4, (n, 2, 1)) + middle
    corner = np.floor(place).astype(int)
    fraction = place - corner  # weights of bilinear interpolation
    padded = np.pad(digits.ink, [(0, 0), (4, 4), (4, 4)])
    ink = np.zeros((n, pages.CELL**2))
    for dy, wy in ((0, 1 - fraction[:, 0]), (1, fraction[:, 0])):
        for dx, wx in ((0, 1 - fraction[:, 1]), (1, fraction[:, 1])):
            row, column = np.clip(corner + [[dy], [dx]] + 4, 0, pages.CELL + 7).transpose(1, 0, 2)
            ink += wy * wx * padded[np.arange(n)[:, None], row, column]
    ink = ink * rng.uniform(0.75, 1.15, (n, 1)) + rng.normal(0, 0.04, ink.shape)
    return Digits(np.clip(ink, 0, 1).reshape(-1, pages.CELL, pages.CELL).astype(np.float32), digits.label)


def batches(digits: Digits, stage: Stage, task: Task, rng: np.random.Generator) -> Iterator[Batch]:
    """Yields random batches of one task without end."""
    layout = Layout.of(stage, task)
    while True:
        yield make_batch(vary(digits, rng), stage, layout, rng)


def make_batch(digits: Digits, stage: Stage, layout: Layout, rng: np.random.Generator) -> Batch:
    rows = [compose_row(make_pages(digits, stage, layout.task, rng), stage, layout, rng) for _ in range(stage.batch)]
    return Batch(*(np.stack(column) for column in zip(*rows, strict=True)))


def make_pages(digits: Digits, stage: Stage, task: Task, rng: np.random.Generator) -> list[Page]:
    """The pages of one row. Each of the ten tags is on at most one of them."""
    if task.kind == "digits":
        return [pages.digit_page(digits, rng)]
    fewest, most = (max(1, n // task.images) for n in stage.entries)
    parts = np.array_split(rng.permutation(10), task.images)
    return [pages.ledger_page(digits, rng, entries=(fewest, most), tags=tags.tolist()) for tags in parts]


def compose_row(
    shown: list[Page], stage: Stage, layout: Layout, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The patches, cells, tokens and weights of one row; see `Batch`."""
    cells = np.stack([_choose_cells(page, stage.shown(layout.task), layout.task.pooled, rng) for page in shown])
    patches = np.stack([_patches(page)[chosen] for page, chosen in zip(shown, cells, strict=True)])
    tokens = [np.zeros(n, np.int32) for n in layout.lengths]
    weights = [np.zeros(n, np.float32) for n in layout.lengths]
    for i, entry in enumerate(_asked(shown, layout, rng)):
        ids, first = branch(entry.question, entry.answer)
        tokens[i][: len(ids)] = ids
        weights[i][first : len(ids)] = 1
    return patches, cells.astype(np.int32), np.concatenate(tokens), np.concatenate(weights)


def _choose_cells(page: Page, count: int, pooled: bool, rng: np.random.Generator) -> Int[np.ndarray, " V"]:
    """The cells with digits and random others, in order. If `pooled`, whole blocks, ordered block by block."""
    places = np.arange(pages.GRID**2)
    if pooled:
        y, x = np.divmod(places, pages.GRID)
        block = y // 2 * (pages.GRID // 2) + x // 2
        size = BLOCK
    else:
        block, size = places, 1
    needed = np.unique(block[list(page.cells)])
    others = np.setdiff1d(block, needed)
    chosen = np.sort(np.concatenate([needed, rng.permutation(others)[: count // size - len(needed)]]))
    return np.argsort(block, kind="stable").reshape(-1, size)[chosen].reshape(-1)


def _patches(page: Page) -> Float[np.ndarray, "cells 8 8"]:
    grid = page.pixels.reshape(pages.GRID, pages.CELL, pages.GRID, pages.CELL).transpose(0, 2, 1, 3)
    return grid.reshape(-1, pages.CELL, pages.CELL).astype(np.float32) / 127.5 - 1


def _asked(shown: list[Page], layout: Layout, rng: np.random.Generator) -> list[Entry]:
    """Different entries in random order. For a digit page, the entry of the whole page is the first."""
    entries = [entry for page in shown for entry in page.entries]
    first = int(layout.task.kind == "digits")
    order = [*range(first), *(first + rng.permutation(len(entries) - first))]
    return [entries[i] for i in order[: len(layout.lengths)]]


@functools.cache
def tokenizer() -> Any:
    return folder.tokenizer()


@functools.lru_cache(maxsize=2**16)
def branch(question: str, answer: str) -> tuple[list[int], int]:
    """Token ids of a question and its answer, from after the image to </s>, and the index where the answer starts."""
    prompt = tokenizer().encode(f"{question} ASSISTANT:", add_special_tokens=False).ids
    return [*prompt, *tokenizer().encode(answer, add_special_tokens=False).ids, folder.EOS], len(prompt)
