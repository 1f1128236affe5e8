"""Buckets of lengths: little padding, few programs."""

import numpy as np

from vlkv.buckets import Buckets, merged, round_up
from vlkv.errors import LONGEST, shortened


def test_lengths_of_text_need_little_padding_and_few_programs():
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(100, 4001, 200)
        padded = np.array([round_up(int(length), Buckets().text) for length in lengths])
        assert (padded >= lengths).all()
        assert padded.sum() <= 1.06 * lengths.sum()
        assert np.mean(padded / lengths) <= 1.06
        assert len(set(padded.tolist())) <= 30


def test_few_rows_share_programs_and_many_do_not():
    """By hand: 20 saves a third of three rows, which is more than a program costs; then 10 saves half of a row.

    The rows up to 20 need only 16, those up to 30 all of it.
    """
    assert merged((10, 20, 30), [5, 15, 15, 25], program=0.9) == (16, 20, 30, 40)
    bounds, rng = Buckets().text, np.random.default_rng(0)
    for low, high, rows, programs in ((900, 1100, 24, 1), (100, 4000, 24, 1), (100, 4000, 200, 9), (3000, 3000, 1, 1)):
        lengths = rng.integers(low, high + 1, rows).tolist()
        few = merged(bounds, lengths, program=16)
        padded = [round_up(n, few) for n in lengths]
        assert max(padded) == round_up(max(lengths), range(16, 5000, 16)) and np.less_equal(lengths, padded).all()
        assert len(set(padded)) <= programs
        for n in (*range(1, min(lengths) // 2, 7), *range(max(padded) + 1, 6000, 250)):  # later turns, longer answers
            assert round_up(n, few) == round_up(n, bounds)


def test_a_message_of_the_greatest_length_stays_as_it_is():
    message = "word " * (LONGEST // 5) + "x" * (LONGEST % 5)
    assert len(message) == LONGEST and shortened(message) == message
    assert shortened(message + "x").split() == [*["word"] * 26, "...", *["word"] * 12, "x"]
