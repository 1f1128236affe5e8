"""Buckets of lengths: little padding, few programs."""

import numpy as np

from vlkv.buckets import Buckets, round_up


def test_lengths_of_text_need_little_padding_and_few_programs():
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(100, 4001, 200)
        padded = np.array([round_up(int(length), Buckets().text) for length in lengths])
        assert (padded >= lengths).all()
        assert padded.sum() <= 1.06 * lengths.sum()
        assert np.mean(padded / lengths) <= 1.06
        assert len(set(padded.tolist())) <= 30
