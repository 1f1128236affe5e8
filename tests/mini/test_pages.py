"""The pages: deterministic, made of digits that training never sees, and legible where they say."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from vlkv.mini import pages


def test_same_seed_same_samples():
    first, second, other = (list(pages.held_out(5, seed)) for seed in (3, 3, 4))
    assert [s[1:] for s in first] == [s[1:] for s in second] != [s[1:] for s in other]
    assert all(a.image.tobytes() == b.image.tobytes() for a, b in zip(first, second, strict=True))
    assert first[0].image.size == (96, 96)
    assert first[0].image.mode == "RGB"


def test_blocks_are_disjoint():
    """The shipped digits are the last 360 of the data set, and training takes the ones before them."""
    training = pytest.importorskip("vlkv.mini.training", reason="needs optax")
    data = pytest.importorskip("sklearn.datasets").load_digits()
    shipped, trained = pages.held_out_digits(), training.training_digits()
    assert len(shipped.label) == pages.HELD_OUT
    assert len(trained.label) + len(shipped.label) == len(data.target)
    np.testing.assert_array_equal(np.concatenate([trained.ink, shipped.ink]) * 16, data.images)
    np.testing.assert_array_equal(np.concatenate([trained.label, shipped.label]), data.target)


def test_digits_lie_in_their_cells():
    digits = pages.held_out_digits()
    pixels = np.rint(255 * (1 - digits.ink)).astype(np.uint8)
    label_of = {pixel.tobytes(): label for pixel, label in zip(pixels, digits.label, strict=True)}
    for seed in range(20):
        page = pages.compose(digits, np.random.default_rng(seed))
        grid = page.pixels.reshape(12, 8, 12, 8).transpose(0, 2, 1, 3).reshape(144, 8, 8)
        found = [label_of[np.ascontiguousarray(grid[cell]).tobytes()] for cell in page.cells]
        assert found == [digit for row in page.rows for digit in row]
        assert list(page.cells) == sorted(set(page.cells))
        assert 2 <= len(page.rows) <= 5


def test_questions_and_answers():
    page = pages.Page(np.zeros((96, 96), np.uint8), ((1, 2), (3,)), (0, 1, 12))
    assert (pages.question(), page.answer()) == ("read the page", "1 2 / 3")
    assert (pages.question(1), page.answer(1)) == ("what does row two say?", "3")


def test_needs_no_sklearn():
    code = "import sys, vlkv.mini.pages as p; list(p.held_out(2)); assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
