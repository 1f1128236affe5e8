"""Document pages: equal to the committed questions, with sums that add up, and without values in common."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks.documents import pages
from benchmarks.documents.__main__ import main
from vlkv.errors import InputError
from vlkv.tools.evaluation.records import read_records

SUMS = re.compile(r"What is the (total|subtotal|tax|total count|quantity of .*|amount (of|for) .*)\?")


def plans(size: int, count: int, *, held_out: bool = False) -> list[pages.Plan]:
    return [pages.plan(number, size, held_out=held_out) for number in range(count)]


@pytest.mark.parametrize("size", pages.SIZES)
def test_the_generator_makes_the_committed_questions(size):
    committed = json.loads(pages.HELD_OUT.read_text())[str(size)]
    assert pages.make_questions(size) == committed
    assert len(committed) == pages.COUNT
    assert [list(one) for one in pages.held_out(size)] == committed


@pytest.mark.parametrize("size", [128, 512])
def test_no_value_is_in_both_sets(size):
    """Neither an answer that is drawn nor the name of a row, whatever page it is on."""
    answers, names = ([set[str](), set[str]()] for _ in range(2))
    row_name = re.compile(r" (?:of|for) (?!the shop|the firm)(.*)\?")
    for held_out in (False, True):
        for made in plans(size, 600, held_out=held_out):
            for question, answer in made.sheet.questions:
                names[held_out].update(row_name.findall(question))
                if not SUMS.fullmatch(question):
                    answers[held_out].add(answer)
    for training, held in (answers, names):
        assert len(held) > 300 and training.isdisjoint(held)


@pytest.mark.parametrize("size", pages.SIZES)
def test_answers_are_on_the_page_and_questions_differ(size):
    for made in plans(size, 200):
        printed = " ".join(cell.text for row in made.sheet.rows for cell in row.cells)
        questions = dict(made.sheet.questions)
        assert len(questions) == len(made.sheet.questions) >= 2
        assert all(answer in printed for answer in questions.values())
        assert sum(row.height for row in made.sheet.rows) <= made.lines + 0.3


def test_sums_add_up():
    def cents(text: str) -> int:
        return int(re.sub(r"[$,.]", "", text))

    seen = 0
    for made in plans(512, 80):
        asked, rows = dict(made.sheet.questions), [[cell.text for cell in row.cells] for row in made.sheet.rows]
        amounts = [cents(answer) for question, answer in asked.items() if re.search("amount (of|for) ", question)]
        if "What is the subtotal?" in asked:
            rate = next(int(row[0].split()[1]) for row in rows if row and row[0].startswith("Tax "))
            subtotal, tax, total = (cents(asked[f"What is the {name}?"]) for name in ("subtotal", "tax", "total"))
            assert (sum(amounts), subtotal + tax) == (subtotal, total) and abs(tax - subtotal * rate / 100) <= 0.5
            seen += 1
        elif amounts:
            assert sum(amounts) == cents(asked["What is the total?"])
        if "What is the total count?" in asked:
            counts = [int(answer) for question, answer in asked.items() if question.startswith("What is the count of")]
            assert sum(counts) == int(asked["What is the total count?"])
    assert seen > 20


def test_pages_follow_from_their_numbers():
    first, again, other = (pages.page(number, 128) for number in (4, 4, 8))
    assert np.array_equal(first.pixels, again.pixels) and not np.array_equal(first.pixels, other.pixels)
    assert first.pixels.shape == (128, 128) and first.pixels.dtype == np.uint8
    assert first.pixels.min() < 100 and np.median(first.pixels) > 150  # ink on paper
    assert {made.kind for made in plans(256, 4)} == {"receipt", "invoice", "form", "table"}


def test_export_is_read_by_eval(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "held_out", lambda size: (("What is the total?", "$213.23"),))
    monkeypatch.setattr("sys.argv", ["documents", str(tmp_path), "--size", "128"])
    assert main() == 0
    [record] = read_records(tmp_path / "questions.jsonl")
    assert record.turns[0].answers == ("$213.23",) and capsys.readouterr().out.strip().endswith("questions.jsonl")


def test_other_sizes_are_refused():
    with pytest.raises(InputError, match="sizes are 128, 256, 384, 512"):
        pages.held_out(100)
