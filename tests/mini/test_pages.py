"""The pages: deterministic, made of digits that training never sees, and legible where they say."""

import numpy as np
import pytest

from benchmarks import train_data
from vlkv.mini import pages


def cells_of(page):
    """[cells, 8, 8] pixels."""
    side = (pages.GRID, pages.CELL)
    return page.pixels.reshape(*side, *side).transpose(0, 2, 1, 3).reshape(-1, pages.CELL, pages.CELL)


@pytest.fixture(scope="module")
def label_of():
    """From the pixels of a cell to the digit that they show, and whether it is white on black."""
    digits, found = pages.held_out_digits(), {}
    for ink, label in zip(digits.ink, digits.label, strict=True):
        for inverted, shade in enumerate((1 - ink, ink)):
            found[np.rint(255 * shade).astype(np.uint8).tobytes()] = int(label), bool(inverted)
    return found


@pytest.mark.parametrize("kind", pages.KINDS)
def test_same_seed_same_samples(kind):
    first, second, other = (list(pages.held_out(5, seed, kind)) for seed in (3, 3, 4))
    assert [s[1:] for s in first] == [s[1:] for s in second] != [s[1:] for s in other]
    assert all(a.image.tobytes() == b.image.tobytes() for a, b in zip(first, second, strict=True))
    assert first[0].image.size == (192, 192) and first[0].image.mode == "RGB"


def test_blocks_are_disjoint():
    """The shipped digits are the last 360 of the data set, and training takes the ones before them."""
    data = pytest.importorskip("sklearn.datasets").load_digits()
    shipped, trained = pages.held_out_digits(), train_data.training_digits()
    assert len(shipped.label) == pages.HELD_OUT
    assert len(trained.label) + len(shipped.label) == len(data.target)
    np.testing.assert_array_equal(np.concatenate([trained.ink, shipped.ink]) * 16, data.images)
    np.testing.assert_array_equal(np.concatenate([trained.label, shipped.label]), data.target)


@pytest.mark.parametrize("shape", pages.SHAPES)
def test_an_entry_is_a_tag_and_its_value_in_a_line(label_of, shape):
    counts, lengths = set(), set()
    for seed in range(20):
        page = pages.ledger_page(pages.held_out_digits(), np.random.default_rng(seed), shape=shape)
        tags = []
        for question, answer, cells, end in page.entries:
            found = [label_of[np.ascontiguousarray(cells_of(page)[cell]).tobytes()] for cell in cells]
            assert [inverted for _, inverted in found] == [True] + [False] * (len(cells) - 1)
            assert question == f"what does {found[0][0]} say?"
            assert answer == " ".join(str(digit) for digit, _ in found[1:])
            y, x = np.divmod(cells, pages.GRID)
            along, across = (x, y) if shape == "right" else (y, x)
            assert np.ptp(across) == 0 and (np.diff(along) == 1).all()
            tags.append(found[0][0])
            lengths.add(len(cells) - 1)
            step = cells[1] - cells[0]
            edge = (cells[-1] + step) // pages.GRID == pages.GRID or (step == 1 and (cells[-1] + 1) % pages.GRID == 0)
            assert end == (() if edge else (cells[-1] + step,)) and not set(end) & set(page.cells)
        assert len(set(tags)) == len(tags)
        assert len(page.cells) == sum(len(entry.cells) for entry in page.entries), "no two entries share a cell"
        counts.add(len(tags))
    assert min(counts) >= 4 and max(counts) <= 10
    assert lengths == {3, 4, 5, 6}


def test_half_of_the_pages_have_either_shape():
    below = [np.diff(sample.evidence[:2])[0] == pages.GRID for sample in pages.held_out(200, 1)]
    assert 0.4 < np.mean(below) < 0.6


def test_several_pages_share_the_tags():
    made, chosen, entry = pages.held_out_set(np.random.default_rng(0), images=3)
    questions = [one.question for page in made for one in page.entries]
    assert len(questions) == len(set(questions)) == 10
    assert entry in made[chosen].entries


def test_digits_lie_in_their_cells(label_of):
    for seed in range(20):
        page = pages.digit_page(pages.held_out_digits(), np.random.default_rng(seed))
        whole, *rows = page.entries
        found = [label_of[np.ascontiguousarray(cells_of(page)[cell]).tobytes()] for cell in whole.cells]
        assert found == [(int(digit), False) for row in rows for digit in row.answer.split()]
        assert list(whole.cells) == sorted(set(whole.cells)) == list(page.cells)
        assert whole.cells == tuple(cell for row in rows for cell in row.cells)
        assert 2 <= len(rows) <= 5
        assert whole.answer == " / ".join(row.answer for row in rows)
        assert [row.question.split()[3] for row in rows] == list(pages.ORDINALS[: len(rows)])
